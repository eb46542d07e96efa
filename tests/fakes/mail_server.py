"""A mail server that receives messages over SMTP, and refuses them or hangs when a test says so."""

import asyncio
import email
import email.policy
import ssl
import warnings
from email.message import EmailMessage
from typing import Any, Self
from urllib.parse import quote

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, Session

USER, PASSWORD = "capsule", "password with @ and /"  # of a server that asks for them


class MailServer:
    """Messages are in `messages`, in the order in which they came."""

    def __init__(
        self, tls: ssl.SSLContext | None = None, *, smtps: bool = False, log_in: bool = False, greets: bool = True
    ) -> None:
        """`tls` is offered with STARTTLS, or with `smtps` required. With `log_in`, a user and a password are too."""
        self.messages: list[EmailMessage] = []
        self.recipients: list[str] = []  # of each message
        self.encrypted: list[bool] = []  # whether each message came over TLS
        self.attempts: list[float] = []  # the times of all messages that were offered, by the loop's clock
        self.refusals: list[str] = []  # for the next messages, one each
        self.may_answer = asyncio.Event()  # to a message, once it is read
        self.may_answer.set()
        self.connections = 0
        self._tls, self._smtps, self._log_in, self._greets = tls, smtps, log_in, greets
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        tls = self._tls if self._smtps else None
        self._server = await asyncio.get_running_loop().create_server(self._connect, "127.0.0.1", 0, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def url(self) -> str:
        user = f"{USER}:{quote(PASSWORD, safe='')}@" if self._log_in else ""
        return f"smtp{'s' if self._smtps else ''}://{user}127.0.0.1:{self.port}"

    def _connect(self) -> asyncio.Protocol:
        self.connections += 1
        if not self._greets:
            return asyncio.Protocol()  # accepts the connection and says nothing
        with warnings.catch_warnings():  # a server must not ask for a password without TLS; this one does not send any
            warnings.simplefilter("ignore", UserWarning)
            return SMTP(
                self,
                hostname="mail.example.com",
                tls_context=None if self._smtps else self._tls,
                auth_required=self._log_in,
                auth_require_tls=False,
                authenticator=self._authenticate if self._log_in else None,
            )

    @staticmethod
    def _authenticate(server: SMTP, session: Session, envelope: Envelope, mechanism: str, data: Any) -> AuthResult:
        success = (data.login, data.password) == (USER.encode(), PASSWORD.encode())
        return AuthResult(success=success, handled=False)  # so that the server answers a refusal

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        self.attempts.append(asyncio.get_running_loop().time())
        if self.refusals:
            return self.refusals.pop(0)
        content = envelope.original_content or b""
        self.messages.append(email.message_from_bytes(content, policy=email.policy.default))
        self.recipients += envelope.rcpt_tos
        self.encrypted.append(self._smtps or session.ssl is not None)
        await self.may_answer.wait()
        return "250 accepted"


def subjects(server: MailServer) -> list[str]:
    return sorted(message["Subject"] for message in server.messages)


def text_of(message: EmailMessage, kind: str = "plain") -> str:
    """Returns the plain or the HTML part of a message."""
    part = message.get_body((kind,))
    assert part is not None
    return str(part.get_content())
