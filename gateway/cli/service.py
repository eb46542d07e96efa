"""The service as the command line tool calls it: with which address and key, and how it says no.

`CAPSULE_URL` and `CAPSULE_API_KEY` win over what `capsule login` kept. A kept key goes only to the address it was kept
for.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import httpx

LOCAL = "http://localhost:8000"
TIMEOUT = 15.0  # seconds that each step of a call may take
UPLOAD_TIMEOUT = 120.0  # seconds from a source's last byte to the answer


class Refused(click.ClickException):
    """The service said no, or nothing: one line on stderr, exit 1."""

    def __init__(self, message: str, *, status: int = 0, passing: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.passing = passing  # may be over in a moment


class Misused(click.ClickException):
    """The tool lacks something, or was given what cannot be: exit 2."""

    exit_code = 2


# -- which service, and as whom ------------------------------------------------------------------------------


def kept_file() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder) / "capsule" if folder else Path(click.get_app_dir("capsule"))) / "credentials.json"


def kept() -> tuple[str, str]:
    """What `capsule login` kept: address and key, or nothing twice."""
    try:
        record = json.loads(kept_file().read_text())
        return str(record["url"]), str(record["apiKey"])
    except FileNotFoundError:
        return "", ""
    except (OSError, ValueError, KeyError, TypeError):
        raise Misused(f"{kept_file()} cannot be read; run 'capsule login' again") from None


def keep(url: str, key: str) -> Path:
    """Written whole and renamed into place; nobody else may read it at any moment."""
    path = kept_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".credentials-")  # 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({"url": url, "apiKey": key}, file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def checked_url(url: str) -> str:
    try:
        parts = httpx.URL(url.strip())
    except httpx.InvalidURL:
        parts = httpx.URL()
    if parts.scheme not in ("http", "https") or not parts.host or parts.userinfo or parts.query or parts.fragment:
        raise Misused(f"{url!r} is not an address; it must look like https://api.example.com")
    return str(parts).rstrip("/")


def checked_key(key: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key:
        raise Misused("the key holds characters that no key has; copy it again")
    return key


def credentials() -> tuple[str, str]:
    url, key = os.environ.get("CAPSULE_URL", ""), os.environ.get("CAPSULE_API_KEY", "").strip()
    if not key:
        kept_url, key = kept()
        if key and url and checked_url(url) != kept_url:
            raise Misused(
                f"CAPSULE_URL is {url}, but you are logged in at {kept_url}: unset it, or set CAPSULE_API_KEY too"
            )
        url = url or kept_url
    elif not url:
        url = kept()[0]
    if not key:
        raise Misused("no API key: run 'capsule login', or set CAPSULE_API_KEY")
    return checked_url(url or LOCAL), checked_key(key)


def path(*parts: str) -> str:
    return "".join("/" + quote(part, safe="") for part in parts)


# -- calling it ----------------------------------------------------------------------------------------------


class Service:
    def __init__(self, url: str, key: str) -> None:
        self.url = url
        try:
            self._http = httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT)
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise Misused(f"the proxy that the environment names cannot be used: {error}") from None

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def fields(self, method: str, path: str, body: Any = None, *, having: str = "id") -> dict[str, Any]:
        """One call; its answer, an object that has at least this field. Raises Refused."""
        return self._object(self._call(method, path, json=body), having)

    def rows(self, path: str, **query: Any) -> list[dict[str, Any]]:
        query = {name: value for name, value in query.items() if value is not None}
        answer = self._decoded(self._call("GET", path, params=query))
        if not isinstance(answer, list) or not all(isinstance(row, dict) for row in answer):
            raise self._strange()
        return answer

    def do(self, method: str, path: str) -> None:
        self._call(method, path)

    def upload(self, path: str, content: Iterable[bytes], size: int) -> dict[str, Any]:
        headers = {"content-type": "application/gzip", "content-length": str(size)}
        timeout = httpx.Timeout(TIMEOUT, read=UPLOAD_TIMEOUT)
        return self._object(self._call("PUT", path, content=content, headers=headers, timeout=timeout), "deployId")

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, self.url + path, **options)
        except httpx.TimeoutException:
            raise Refused(f"{self.url} did not answer in time; try again", passing=True) from None
        except httpx.ConnectError:
            raise Refused(
                f"cannot reach {self.url}; is the service running, and the address right?", passing=True
            ) from None
        except httpx.HTTPError as error:
            raise Refused(f"{self.url} broke off: {str(error) or type(error).__name__}", passing=True) from None
        if answer.is_success:
            return answer
        raise self._refusal(answer)

    def _refusal(self, answer: httpx.Response) -> Refused:
        status, passing = answer.status_code, answer.status_code in (429, 502, 503, 504)
        if answer.has_redirect_location:
            return Refused(f"{self.url} redirects to {answer.headers['location']}; use the address it leads to")
        try:
            said = answer.json()["error"]
            details = [str(said["code"]), f"request {said['requestId']}"]
            message = str(said["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            told = f"{self.url} answered {status} {answer.reason_phrase}".rstrip()
            return Refused(told, status=status, passing=passing)
        if details[0] == "UNAUTHORIZED":
            message = "this key does not open that: accounts use their API key, operators the operator token"
        if seconds := answer.headers.get("retry-after"):
            details.insert(1, f"again in {seconds} s")
        return Refused(f"{message} ({', '.join(details)})", status=status, passing=passing)

    def _object(self, answer: httpx.Response, having: str) -> dict[str, Any]:
        found = self._decoded(answer)
        if not isinstance(found, dict) or found.get(having) is None:
            raise self._strange()
        return found

    def _decoded(self, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except (ValueError, RecursionError):
            raise self._strange() from None

    def _strange(self) -> Refused:
        return Refused(f"{self.url} answers, but not as this service does; is the address right?")


def service() -> Service:
    """For the command that runs; closed when it ends."""
    return click.get_current_context().with_resource(Service(*credentials()))
