"""The HTTP client of the command line: the address and key it uses, and how it reports failures.

`CAPSULE_URL` and `CAPSULE_API_KEY` take precedence over the credentials that `capsule login` saved. A saved key is
only sent to the address it was saved with.

httpx takes longer to import than most commands take to run, so only commands that call the service import it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from urllib.parse import quote

import click

if TYPE_CHECKING:
    import ssl

    import httpx

SERVICE = "service"  # in the context's meta
LOCAL_URL = "http://localhost:8000"
NO_SUCH_APP = "There is no such app in this account."  # what the service says
NOT_PERMITTED = "NOT_PERMITTED"  # the code for a call that the key's scope does not include
ACCOUNT_KEY_PREFIX = "csk_"  # of every API key
OPERATORS_COMMANDS = {  # what operators use in place of an account's call
    "/account": "capsule accounts list",
    "/account/apps": "capsule apps list",
    "/account/keys": "capsule accounts keys ACCOUNT",
    "/account/usage": "capsule accounts usage ACCOUNT",
}
STEP_SECONDS = 15.0  # timeout of each step of a call
SILENCE_SECONDS = 60.0  # timeout without a byte of a stream; the service sends one every three seconds
UPLOAD_SECONDS = 120.0  # timeout from the last byte of an upload to the answer
RETRIES = 15  # of `retry`

Result = TypeVar("Result")


class ServiceRefusal(click.ClickException):
    """The service refused the call or could not be reached: one line on stderr, exit code 1."""

    def __init__(self, message: str, *, status: int = 0, code: str = "", temporary: bool = False) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.temporary = temporary  # the same call may succeed in a moment


class WrongUsage(click.ClickException):
    """An argument, a setting or the credentials are invalid: one line on stderr, exit code 2."""

    exit_code = 2


# -- credentials ---------------------------------------------------------------------------------------------


def credentials_file() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder) / "capsule" if folder else Path(click.get_app_dir("capsule"))) / "credentials.json"


def load_saved_credentials() -> tuple[str, str]:
    """Returns the address and key that `capsule login` saved, or two empty strings."""
    try:
        record = json.loads(credentials_file().read_text())
        return str(record["url"]), str(record["apiKey"])
    except FileNotFoundError:
        return "", ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise WrongUsage(f"{credentials_file()} cannot be read; run 'capsule login' again") from None


def save_credentials(url: str, key: str) -> Path:
    path = credentials_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write(json.dumps({"url": url, "apiKey": key}).encode())
    return path


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that replaces the one at the path in one step, once it is complete. No other user can read it."""
    descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=".capsule-")  # 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def parse_url(url: str) -> str:
    import httpx

    try:
        parts = httpx.URL(url.strip())
    except httpx.InvalidURL:
        parts = httpx.URL()
    if parts.scheme not in ("http", "https") or not parts.host or parts.userinfo or parts.query or parts.fragment:
        raise WrongUsage(f"{url!r} is not an address; use one like https://api.example.com")
    return str(parts).rstrip("/")


def parse_key(key: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key:
        raise WrongUsage("the key contains invalid characters; copy it again")
    return key


def find_credentials() -> tuple[str, str]:
    """Returns the address and key to use. Raises WrongUsage if there is no key, or if it belongs to another address."""
    url, key = os.environ.get("CAPSULE_URL", ""), os.environ.get("CAPSULE_API_KEY", "").strip()
    if not key:
        saved_url, key = load_saved_credentials()
        if key and url and parse_url(url) != saved_url:
            raise WrongUsage(
                f"CAPSULE_URL is {url}, but you are logged in to {saved_url}: unset it, or set CAPSULE_API_KEY too"
            )
        url = url or saved_url
    elif not url:
        url = load_saved_credentials()[0]
    if not key:
        raise WrongUsage("no API key: run 'capsule login', or set CAPSULE_API_KEY")
    return parse_url(url or LOCAL_URL), parse_key(key)


def retry(call: Callable[[], Result], pause: float) -> Result:
    """Repeats the call, with pauses of so many seconds, while it fails for a moment, such as at a restart."""
    for _ in range(RETRIES):
        try:
            return call()
        except ServiceRefusal as refused:
            if not refused.temporary:
                raise
            time.sleep(pause)
    return call()


def call_if_permitted(call: Callable[[], Result]) -> Result | None:
    """Returns the call's result, or None if the key's scope does not include the call."""
    try:
        return call()
    except ServiceRefusal as refused:
        if refused.code != NOT_PERMITTED:
            raise
        return None


def path(*parts: str) -> str:
    return "".join("/" + quote(part, safe="") for part in parts)


# -- calls ---------------------------------------------------------------------------------------------------


class Service:
    def __init__(self, url: str, key: str, timeout: float | None = None, reason: str | None = None) -> None:
        """`reason` is an operator's, for the audit trail."""
        self.url = url
        self.is_account = key.startswith(ACCOUNT_KEY_PREFIX)  # otherwise the key is the operator token
        import httpx

        headers = {"authorization": f"Bearer {key}"}
        if reason is not None:
            headers["x-reason"] = quote(reason, safe=" ")
        try:
            self._http = httpx.Client(headers=headers, timeout=timeout or STEP_SECONDS, verify=_trust(url))
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise WrongUsage(f"cannot use the proxy from the environment: {error}") from None

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def request_object(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        having: str = "id",
        query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        seconds: float = STEP_SECONDS,
    ) -> dict[str, Any]:
        """Returns the answer, an object that has at least the field `having` ('': any object). Raises ServiceRefusal.

        `seconds` is the timeout for the answer.
        """
        answer = self._call(method, path, query, json=body, headers=headers, timeout=_timeouts(seconds))
        return self._read_object(answer, having)

    def list_rows(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """Returns the answer, a list of objects. Raises ServiceRefusal."""
        answer = self._decode(self._call("GET", path, query))
        if not isinstance(answer, list) or not all(isinstance(row, dict) for row in answer):
            raise self._unexpected_answer()
        return answer

    def send(self, method: str, path: str, body: Any = None, *, seconds: float = STEP_SECONDS, **query: Any) -> None:
        """Ignores the answer. `seconds` is the timeout for it. Raises ServiceRefusal."""
        self._call(method, path, query, json=body, timeout=_timeouts(seconds))

    def download(self, path: str) -> Iterator[bytes]:
        """Yields the content at the path. Raises ServiceRefusal."""
        with self._open_stream(path) as answer:
            yield from answer.iter_raw()

    def read_text(self, path: str, **query: Any) -> str:
        """Raises ServiceRefusal."""
        return self._call("GET", path, query).text

    def stream_events(self, path: str, **query: Any) -> Iterator[str]:
        """Yields the data of each event until the service ends the stream. Raises ServiceRefusal."""
        with self._open_stream(path, params=_given(query), headers={"accept": "text/event-stream"}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")

    def upload_source(
        self, path: str, content: Iterable[bytes], size: int, media_type: str, query: dict[str, Any]
    ) -> dict[str, Any]:
        headers = {"content-type": media_type, "content-length": str(size)}
        timeout = _timeouts(UPLOAD_SECONDS)
        answer = self._call("PUT", path, query, content=content, headers=headers, timeout=timeout)
        return self._read_object(answer, "deployId")

    @contextlib.contextmanager
    def _open_stream(self, path: str, **options: Any) -> Iterator[httpx.Response]:
        stream = self._http.stream("GET", self.url + path, timeout=_timeouts(SILENCE_SECONDS), **options)
        with self._map_failures(), stream as answer:
            if not answer.is_success:
                answer.read()
                raise self._make_refusal(answer)
            yield answer

    def _call(self, method: str, path: str, query: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
        with self._map_failures():
            answer = self._http.request(method, self.url + path, params=_given(query or {}) or None, **options)
        if answer.is_success:
            return answer
        raise self._make_refusal(answer)

    @contextlib.contextmanager
    def _map_failures(self) -> Iterator[None]:
        """Maps failures of the connection to ServiceRefusal."""
        import httpx

        try:
            yield
        except httpx.TimeoutException:
            raise ServiceRefusal(f"{self.url} did not answer in time; try again", temporary=True) from None
        except httpx.ConnectError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ServiceRefusal(
                    f"the certificate of {self.url} is not trusted here; if you trust its authority, set SSL_CERT_FILE "
                    "to the file with the authority's certificate"
                ) from None
            raise ServiceRefusal(
                f"cannot reach {self.url}; check the address, and that the service is running", temporary=True
            ) from None
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
            raise ServiceRefusal(f"the connection to {self.url} failed: {cause}", temporary=True) from None

    def _make_refusal(self, answer: httpx.Response) -> ServiceRefusal:
        status, temporary = answer.status_code, answer.status_code in (429, 502, 503, 504)
        if answer.has_redirect_location:
            return ServiceRefusal(f"{self.url} redirects to {answer.headers['location']}; use that address instead")
        try:
            error = answer.json()["error"]
            details = [str(error["code"]), f"request {error['requestId']}"]
            message = str(error["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            message = f"{self.url} answered {status} {answer.reason_phrase}".rstrip()
            return ServiceRefusal(message, status=status, temporary=temporary)
        message = self._name_app(message) if message == NO_SUCH_APP else _name_parameter(message)
        if details[0] == "UNAUTHORIZED":
            message = self._explain_refused_key(answer.request.url.path)
        if seconds := answer.headers.get("retry-after"):
            details.insert(1, f"retry after {seconds} s")
        text = f"{message} ({', '.join(details)})"
        return ServiceRefusal(text, status=status, code=details[0], temporary=temporary)

    def _explain_refused_key(self, path: str) -> str:
        """Says which key the call needs, and what to use instead."""
        if self.is_account and path.startswith("/platform"):
            return "this is an account's API key; operators' commands need the operator token"
        if self.is_account:
            return "this API key is not valid here; it may be revoked, or belong to another service"
        if path.startswith("/platform"):
            return "this operator token is not valid here"
        command = OPERATORS_COMMANDS.get(path, "capsule accounts show ACCOUNT")
        needed = f"this command needs an account's API key, which begins with {ACCOUNT_KEY_PREFIX}"
        return f"{needed}; operators use '{command}', or the page {self.url}/ops"

    def _name_app(self, message: str) -> str:
        """Returns a message that repeats the name of the app, and suggests the nearest one of the account."""
        context = click.get_current_context(silent=True)
        name = context.params.get("app") if context else None
        if not isinstance(name, str):
            return message
        try:
            names = [str(row.get("name")) for row in self.list_rows("/account/apps")]
        except ServiceRefusal:
            names = []
        return f"There is no app {name} in this account{suggest(name, names)}"

    def _read_object(self, answer: httpx.Response, having: str) -> dict[str, Any]:
        value = self._decode(answer)
        if not isinstance(value, dict) or (having and value.get(having) is None):
            raise self._unexpected_answer()
        return value

    def _decode(self, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except (ValueError, RecursionError):
            raise self._unexpected_answer() from None

    def _unexpected_answer(self) -> ServiceRefusal:
        return ServiceRefusal(f"{self.url} does not answer like this service; check the address")


def _trust(url: str) -> ssl.SSLContext | bool:
    """Returns what httpx trusts: for plain HTTP without a proxy nobody, which spares reading the certificates."""
    import ssl
    import urllib.request

    if url.startswith("http://") and not urllib.request.getproxies():
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return True


def _given(query: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that have a value."""
    return {name: value for name, value in query.items() if value is not None}


def _timeouts(seconds: float) -> httpx.Timeout:
    """Returns the timeouts of a call whose answer may take `seconds`."""
    import httpx

    return httpx.Timeout(STEP_SECONDS, read=seconds)


def suggest(word: str, words: Iterable[str]) -> str:
    """Returns the end of a message about an unknown word, with the known one that is most like it."""
    import difflib

    close = difflib.get_close_matches(word, [*words], 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _name_parameter(message: str) -> str:
    """Names what was typed, the option or argument of the running command, in place of the field that it set."""
    context = click.get_current_context(silent=True)
    field, colon, text = message.partition(": ")
    if context is None or not colon:
        return message
    snake = re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", field)
    for name in (field, snake, *reversed(field.split("."))):
        for param in context.command.params:
            if param.name == name:
                is_option = isinstance(param, click.Option)
                typed = max(param.opts, key=len) if is_option else param.human_readable_name.strip("[]")
                return f"{typed}: {text}"
    return message


def open_service(reason: str | None = None) -> Service:
    """Returns the service of the running command. It is opened by the first call, and closed when the command ends."""
    context = click.get_current_context()
    if SERVICE not in context.meta:
        context.meta[SERVICE] = context.with_resource(Service(*find_credentials(), reason=reason))
    service: Service = context.meta[SERVICE]
    return service
