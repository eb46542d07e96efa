"""Sessions of browsers in Redis, and the people who signed in.

A session is a random token. For twelve hours, Redis keeps the token's hash and the session's subject: the API key that
opened it, a fingerprint of the operator token, or the person who signed in. A session ends when its key is revoked,
when its person is removed from the account that is chosen in it, when GATEWAY_OIDC_ISSUER is no longer the one where
its person signed in, and when its holder has opened twenty more. No account ends a session that is not for it: an
operator's session goes on without an account.
"""

import secrets

import msgspec

from gateway.accounts.api_keys import digest
from gateway.keys import session_key, sessions_key
from gateway.redis.client import Store

SESSION_SECONDS = 12 * 3600
MAX_SESSIONS = 20  # of one API key, operator or person


class Person(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who signed in. Its text is the subject of the session."""

    email: str  # verified, in lower case
    account: str = ""  # id of the account that the session is for; empty until the person has chosen
    operator: str = ""  # the entry of GATEWAY_OIDC_OPERATORS that makes the person an operator
    issuer: str = ""  # the GATEWAY_OIDC_ISSUER where the person signed in

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def holder(self) -> str:
        """Names the person, whose sessions are listed together."""
        return f"person:{self.email}"

    @classmethod
    def parse(cls, subject: str | None) -> "Person | None":
        """Returns None for the subject of another session."""
        return msgspec.json.decode(subject, type=cls) if subject and subject.startswith("{") else None


class SessionStore:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def open(self, subject: str) -> str:
        """Returns the token of a new session, and ends the holder's oldest sessions beyond the limit."""
        token = secrets.token_urlsafe(32)
        own, sessions = digest(token), sessions_key(digest(_holder_of(subject)))
        await self._store.client.set(session_key(own), subject, ex=SESSION_SECONDS)
        async with self._store.client.pipeline(transaction=True) as pipe:
            pipe.lpush(sessions, own)
            pipe.lrange(sessions, MAX_SESSIONS, -1)
            pipe.ltrim(sessions, 0, MAX_SESSIONS - 1)
            pipe.expire(sessions, SESSION_SECONDS)
            _, ended, *_ = await pipe.execute()
        for each in ended:
            await self._store.client.delete(session_key(each))
        return token

    async def find_subject(self, token: str) -> str | None:
        return await self._store.get(session_key(digest(token))) if token else None

    async def close(self, token: str) -> None:
        await self._store.client.delete(session_key(digest(token)))

    async def close_all(self, subject: str) -> None:
        """Ends all sessions of the subject's holder: a person, an API key or an operator."""
        sessions = sessions_key(digest(_holder_of(subject)))
        for session in await self._store.client.lrange(sessions, 0, -1):
            await self._store.client.delete(session_key(session))
        await self._store.client.delete(sessions)

    async def close_membership(self, email: str, account_id: str) -> None:
        """Ends the sessions for the account of a person who is no member any more.

        An operator's session goes on without an account, because no account decides who is an operator.
        """
        sessions = sessions_key(digest(Person(email).holder))
        for session in await self._store.client.lrange(sessions, 0, -1):
            person = Person.parse(await self._store.get(session_key(session)))
            if person is None or person.account != account_id:
                continue
            if person.operator:
                await self._replace(session, msgspec.structs.replace(person, account=""))
            else:
                await self._store.client.delete(session_key(session))

    async def choose_account(self, token: str, person: Person, account_id: str) -> None:
        """Makes the account that of the session, which keeps its end."""
        await self._replace(digest(token), msgspec.structs.replace(person, account=account_id))

    async def _replace(self, session: str, person: Person) -> None:
        await self._store.client.set(session_key(session), str(person), xx=True, keepttl=True)


def _holder_of(subject: str) -> str:
    person = Person.parse(subject)
    return subject if person is None else person.holder
