"""The demo apps of `capsule dev`: the templates, published through the service as an account holder would.

The first build of `demo` takes as long as npm needs, so it runs while everything else is in use. Where it fails, the
static template takes its place. `hello` is the static template, which is live within seconds.
"""

import asyncio
import contextlib
import hashlib
import io
import secrets
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal, get_args

import httpx
import jwt

from capsule_gateway.dev import report
from capsule_gateway.dev.account import DemoApp, bearer
from capsule_gateway.dev.key_file import Keys, replace_file, save
from capsule_gateway.dev.layout import DEMO, HELLO, Layout
from capsule_gateway.dev.visitor import POLL_SECONDS, open_app, wait_for_answer

Kind = Literal["full", "static"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Writes the template of this kind, with the app's name, into a folder.
WriteTemplate = Callable[[str, Kind, Path], None]

IN_PROGRESS = ("queued", "building", "checking", "canary")
BUILD_SECONDS = 900.0  # for the first build, whose packages are downloaded
START_SECONDS = 30.0  # for an app that was live in the last run
USER = {"name": "Demo", "email": "demo@example.com"}
TOKEN_SECONDS = 300.0  # between two tokens; those of the template are valid for 15 minutes
LIFE_SECONDS = 3_600  # of a token that `capsule dev` signs itself
RETRY_SECONDS = 2.0


class DemoFailed(Exception):
    """The demo app is not served. The screen shows the message."""


class Demo:
    """The demo app. `http` calls the service; `app` calls the app as its visitors do."""

    def __init__(
        self, layout: Layout, keys: Keys, record: DemoApp, http: httpx.AsyncClient, app: httpx.AsyncClient
    ) -> None:
        self.layout, self.keys, self._http, self._app = layout, keys, http, app
        self._signs_itself = record.auth["kind"] == "secret"

    async def is_current(self, write_template: WriteTemplate) -> bool:
        """Returns whether the app answers, and was published with this template."""
        files = await asyncio.to_thread(pack_template, write_template, "full", DEMO)
        try:
            deploys = await self._get(f"/account/deploys?app={DEMO}&limit=1")
            if self.keys.demo != _digest(files) or not deploys or deploys[0]["state"] != "live":
                return False
            await self.wait_for_answer()
        except (DemoFailed, httpx.HTTPError):
            return False
        return True

    async def publish_both(self, write_template: WriteTemplate, *, is_built: bool) -> None:
        """Publishes `hello`, then `demo` unless it `is_built`.

        One after the other, because an account can upload two sources at once, and the user may be publishing, too.
        """
        await self.publish_hello(write_template)
        if not is_built:
            await self.bring_up(write_template)

    async def bring_up(self, write_template: WriteTemplate) -> None:
        """Publishes the template, or the static one if that fails, and prints the outcome."""
        began = time.monotonic()
        for kind in KINDS:
            try:
                files = await asyncio.to_thread(pack_template, write_template, kind, DEMO)
                if not await self._publish(files):
                    return
                await self.wait_for_answer()
            except (DemoFailed, httpx.HTTPError) as error:
                report.print_demo_fault(kind, str(error))
                continue
            if kind == "full":
                self.keys.demo = _digest(files)
                save(self.keys, self.layout.keys)
            report.print_answer(self.layout, time.monotonic() - began)
            return

    async def publish_hello(self, write_template: WriteTemplate) -> None:
        """Publishes `hello`, unless it is published already. Prints an error if that fails."""
        try:
            if not any(app["name"] == HELLO for app in await self._get("/account/apps")):
                (await self._http.post("/account/apps", json={"name": HELLO})).raise_for_status()
            deploys = await self._get(f"/account/deploys?app={HELLO}&limit=1")
            if not deploys or deploys[0]["state"] not in ("live", *IN_PROGRESS):
                files = await asyncio.to_thread(pack_template, write_template, "static", HELLO)
                (await self._http.put(f"/account/apps/{HELLO}/source", content=files)).raise_for_status()
        except httpx.HTTPError as error:
            report.print_error(f"The app {HELLO} could not be published: {error}")

    async def _publish(self, files: bytes) -> bool:
        """Publishes the packed files, and waits until the app is live. Raises DemoFailed.

        Returns False if somebody published another source meanwhile.
        """
        await self._set_missing_secret()
        answer = await self._http.put(f"/account/apps/{DEMO}/source", content=files)
        deploy = {"id": answer.raise_for_status().json()["deployId"], "state": "queued"}
        ends = time.monotonic() + BUILD_SECONDS
        while deploy["state"] in IN_PROGRESS:
            if time.monotonic() > ends:
                raise DemoFailed(f"its deploy {deploy['id']} takes more than {BUILD_SECONDS / 60:.0f} minutes")
            await asyncio.sleep(POLL_SECONDS)
            deploy = await self._get(f"/account/deploys/{deploy['id']}")
            if deploy["state"] in ("canary", "live"):  # the swap has changed how tokens are verified
                await self.write_token()
        if deploy["state"] == "failed":
            raise DemoFailed(f"{_read_cause(deploy)} (capsule deploys show {deploy['id']})")
        return bool(deploy["state"] == "live")

    async def _set_missing_secret(self) -> None:
        path = f"/account/apps/{DEMO}/env"
        if not any(variable["name"] == "BETTER_AUTH_SECRET" for variable in await self._get(path)):
            body = {"BETTER_AUTH_SECRET": secrets.token_urlsafe(32)}
            (await self._http.put(path, json=body)).raise_for_status()

    async def _get(self, path: str) -> Any:
        return (await self._http.get(path)).raise_for_status().json()

    async def wait_for_answer(self) -> None:
        """Waits until the app answers, and a user's token is written. Raises DemoFailed."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await wait_for_answer(self._app)
        except TimeoutError:
            raise DemoFailed(f"it does not answer after {START_SECONDS:.0f} seconds (capsule logs {DEMO})") from None
        await self.write_token()

    # -- the token of a user, for the line to paste ------------------------------------------------------------

    async def keep_token(self) -> None:
        """Writes a fresh token in time. Runs until canceled."""
        while True:
            pause = TOKEN_SECONDS if await self.write_token() else RETRY_SECONDS
            await asyncio.sleep(pause)

    async def write_token(self) -> bool:
        """Returns whether a token was written."""
        try:
            token = await self._sign_in()
        except (httpx.HTTPError, ValueError, KeyError):  # not the template, or it does not run
            if not self._signs_itself:
                return False
            claims = {"sub": "demo", "exp": int(time.time()) + LIFE_SECONDS}
            token = jwt.encode(claims, self.keys.auth_secret, "HS256")
        else:
            self._signs_itself = False
        replace_file(self.layout.user_token, token.encode())
        return True

    async def _sign_in(self) -> str:
        """Returns a token of the app's own backend. Raises httpx.HTTPError, ValueError and KeyError."""
        answer = await self._app.get("/api/auth/token")
        if answer.status_code == 401:
            account = {**USER, "password": self.keys.password}
            answer = await self._app.post("/api/auth/sign-in/email", json=account)
            if answer.status_code == 401:
                answer = await self._app.post("/api/auth/sign-up/email", json=account)
            answer.raise_for_status()
            answer = await self._app.get("/api/auth/token")
        return str(answer.raise_for_status().json()["token"])


@contextlib.asynccontextmanager
async def open_demo(layout: Layout, keys: Keys, record: DemoApp) -> AsyncIterator[Demo]:
    async with (
        httpx.AsyncClient(base_url=layout.local, trust_env=False, timeout=10, headers=bearer(keys.api_key)) as http,
        open_app(layout) as app,
    ):
        yield Demo(layout, keys, record, http, app)


def pack_template(write_template: WriteTemplate, kind: Kind, name: str) -> bytes:
    """Returns the template as a tar.gz, the same bytes each time."""
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        write_template(name, kind, Path(folder))
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for path in sorted(Path(folder).rglob("*")):
                tar.add(path, arcname=path.relative_to(folder).as_posix(), recursive=False)
    return packed.getvalue()


def _read_cause(deploy: dict[str, Any]) -> str:
    """Returns the error, and the first host that the build could not reach."""
    unreached = [line for line in deploy["log"].splitlines() if line.startswith("Network: ")]
    return "; ".join([str(deploy.get("error")), *unreached[:1]])


def _digest(files: bytes) -> str:
    """Returns the digest of the files' names and contents, without their times."""
    digest = hashlib.sha256()
    with tarfile.open(fileobj=io.BytesIO(files)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            digest.update(repr((member.name, content.read() if content else b"")).encode())
    return digest.hexdigest()
