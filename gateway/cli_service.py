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

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # None: no answer of the service

    @property
    def passing(self) -> bool:
        """May be over in a moment."""
        return self.status is None or self.status in (429, 502, 503, 504)


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
        raise click.UsageError(f"{kept_file()} cannot be read; run 'capsule login' again") from None


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
    if parts.scheme not in ("http", "https") or not parts.host:
        raise click.UsageError(f"{url!r} is not an address; it must look like https://api.example.com")
    return str(parts).rstrip("/")


def checked_key(key: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key:
        raise click.UsageError("the key holds characters that no key has; copy it again")
    return key


def credentials() -> tuple[str, str]:
    url, key = os.environ.get("CAPSULE_URL", ""), os.environ.get("CAPSULE_API_KEY", "")
    if not key:
        kept_url, key = kept()
        if key and url and checked_url(url) != kept_url:
            raise click.UsageError(
                f"you are logged in at {kept_url}, but CAPSULE_URL is {url}: set CAPSULE_API_KEY too, or unset CAPSULE_URL"
            )
        url = url or kept_url
    elif not url:
        url = kept()[0]
    if not key:
        raise click.UsageError("no API key: run 'capsule login', or set CAPSULE_API_KEY")
    return checked_url(url or LOCAL), checked_key(key)


def path(*parts: str) -> str:
    return "".join("/" + quote(part, safe="") for part in parts)


# -- calling it ----------------------------------------------------------------------------------------------


class Service:
    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._http = httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def fields(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One call that answers with an object. Raises Refused."""
        answer = self._decoded(self._call(method, path, json=body))
        if not isinstance(answer, dict):
            raise self._strange()
        return answer

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
        answer = self._decoded(self._call("PUT", path, content=content, headers=headers, timeout=timeout))
        if not isinstance(answer, dict):
            raise self._strange()
        return answer

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, self.url + path, **options)
        except httpx.TimeoutException:
            raise Refused(f"{self.url} did not answer in time; try again") from None
        except httpx.ConnectError:
            raise Refused(f"cannot reach {self.url}; is the service running, and CAPSULE_URL right?") from None
        except httpx.HTTPError as error:
            raise Refused(f"{self.url} broke off: {error or type(error).__name__}") from None
        if answer.is_success:
            return answer
        raise self._refusal(answer)

    def _refusal(self, answer: httpx.Response) -> Refused:
        if answer.is_redirect:
            return Refused(f"{self.url} redirects to {answer.headers['location']}; set CAPSULE_URL to where it leads")
        try:
            said = answer.json()["error"]
            details = [str(said["code"]), f"request {said['requestId']}"]
            message = str(said["message"])
        except (ValueError, KeyError, TypeError):
            return Refused(f"{self.url} answered {answer.status_code} {answer.reason_phrase}".rstrip(), answer.status_code)
        if seconds := answer.headers.get("retry-after"):
            details.insert(1, f"again in {seconds} s")
        return Refused(f"{message} ({', '.join(details)})", answer.status_code)

    def _decoded(self, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except ValueError:
            raise self._strange() from None

    def _strange(self) -> Refused:
        return Refused(f"{self.url} answers, but not as this service does; is CAPSULE_URL right?")


def service() -> Service:
    """For the command that runs; closed when it ends."""
    return click.get_current_context().with_resource(Service(*credentials()))
