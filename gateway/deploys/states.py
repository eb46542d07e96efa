"""Deploys: hooks, the daily quota, the queue, and the states a deploy goes through.

    queued → building → checking → canary → live        a preview goes from checking to live
                  ╰───────┴──────────┴─────→ failed

The move of a state, the event that follows from it and the app's live deploy are one script with a compare-and-set,
so that every deploy ends once and tells it once, whoever builds it: our worker, or an outside engine that reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import time
from collections.abc import AsyncIterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.deploys.hooks import TRIGGERS_A_MINUTE, Hook
from gateway.errors import (
    BackboneUnavailable,
    DeployQuotaReached,
    HookRateLimited,
    NoDeployYet,
    NotFound,
    RequestMalformed,
    RequestTooLarge,
    ServiceError,
    TarballGone,
)
from gateway.events.catalogue import DeployFailed, DeploySucceeded, Event, Kind, Phase, encode
from gateway.ids import new_id, now_iso
from gateway.settings import Settings
from gateway.store import keys
from gateway.store.client import backbone
from gateway.store.scripts import Script

STREAM, GROUP = "builds", "deploys"
LOG_BYTES = 262_144  # of one deploy
SLUG_LENGTH = 19
SOURCE_BYTES = 104_857_600  # of a packed source
WAITING = 1_000  # deploys of a partition that are looked through
SOURCES = 10  # stored of one app, beside the live one's
ENGINE_SECONDS = 7_200.0  # that an outside engine has from its first report to its last
SOURCE_SECONDS = 600.0  # that its upload may take
REASON_LENGTH = 500

Trigger = Literal["hook", "upload", "operator"]
State = Literal["queued", "building", "checking", "canary", "live", "failed"]

# state, phase → the state after it went well
NEXT: dict[tuple[str, str], State] = {
    ("queued", "build"): "checking",
    ("building", "build"): "checking",
    ("checking", "health"): "canary",
    ("canary", "canary"): "live",
}


class Moved(Exception):
    """The deploy is not in the state it was read in: somebody else moved it."""


class Deploy(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    account: str
    app: str
    appId: str
    kind: Kind
    state: State
    trigger: Trigger
    createdAt: str
    source: str = ""  # id of a stored source; empty: the repository
    branch: str | None = None
    commit: str | None = None
    startedAt: str | None = None
    finishedAt: str | None = None
    durationMs: int | None = None
    url: str | None = None
    error: str | None = None


def slug(branch: str) -> str:
    """Branches that differ only in punctuation share one: the interface's rule."""
    return re.sub(r"[^a-z0-9]+", "-", branch.lower()).strip("-")[:SLUG_LENGTH].rstrip("-") or "preview"


def host(app: str, kind: Kind, branch: str | None, domain: str) -> str:
    if kind == "live":
        return f"{app}.{domain}"
    return f"{app}-preview.{domain}" if branch is None else f"{app}--p-{slug(branch)}.{domain}"


class Deploys:
    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._registry, self._store = settings, registry, registry.store
        self._trigger, self._advance = Script("trigger"), Script("advance")
        self._sources = Path(settings.data_dir) / "sources"

    # -- queueing --------------------------------------------------------------------------------------------

    async def queue(
        self,
        app: App,
        trigger: Trigger,
        *,
        kind: Kind = "live",
        branch: str | None = None,
        source: str = "",
        hook: Hook | None = None,
    ) -> str:
        """The id of the queued deploy. Raises the hook's refusals."""
        account = await self._registry.account(app.account)
        if account is None:
            raise NotFound
        deploy_id, tag = new_id("dep"), keys.tag(account.id)
        record = {
            "id": deploy_id,
            "account": account.id,
            "app": app.name,
            "appId": app.id,
            "kind": kind,
            "trigger": trigger,
            "createdAt": now_iso(),
            **({} if branch is None else {"branch": branch}),
        }
        with backbone():
            verdict, wait, _ = await self._store.run(
                self._trigger,
                [
                    keys.hook_window_key(tag, hook.id if hook else ""),
                    keys.hooks_used_key(account.id),
                    keys.site_key(app.account, app.id),
                    keys.deploys_on_prefix(account.id),
                    keys.deploy_key(account.id, deploy_id),
                    keys.deploys_key(account.id),
                    keys.stream_key(tag, STREAM),
                ],
                hook.id if hook else "",
                TRIGGERS_A_MINUTE,
                self._settings.deploy_quotas[account.plan],
                source,
                "1" if app.repository is not None else "",
                deploy_id,
                account.id,
                app.id,
                *[part for pair in record.items() for part in pair],
            )
        if verdict != "queued":
            raise self._refusal(str(verdict), int(wait))
        return deploy_id

    @staticmethod
    def _refusal(verdict: str, wait: int) -> ServiceError:
        match verdict:
            case "rate":
                return HookRateLimited(retry_after=wait / 1_000_000)
            case "never-live":
                return NoDeployYet()
            case "source-gone":
                return TarballGone()
            case "full":
                return BackboneUnavailable(
                    "Too many deploys wait to be built; nothing was queued. Try again in a minute."
                )
            case _:
                return DeployQuotaReached(retry_after=86_400 - time.time() % 86_400)

    async def today(self, account_id: str, day: str) -> int:
        return int(await self._store.get(f"{keys.deploys_on_prefix(account_id)}:{day}") or 0)

    # -- stored sources --------------------------------------------------------------------------------------

    async def publish(self, app: App, body: AsyncIterable[bytes], trigger: Trigger) -> str:
        """Stores a tar.gz and queues a live deploy of it; its id. A refused deploy leaves nothing stored."""
        source = new_id("src")
        path = self._source(app.id, source)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            await self._receive(body, path)
            deploy_id = await self.queue(app, trigger, source=source)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        await self._tidy(app)
        return deploy_id

    async def _tidy(self, app: App) -> None:
        """The live one, those that wait to be built, and the newest stay; their ids sort by time."""
        stored = sorted((self._sources / app.id).glob("*.tar.gz"))
        if len(stored) <= SOURCES:
            return
        client = self._store.client
        with backbone():
            needed = {await client.hget(keys.site_key(app.account, app.id), "source")}
            waiting = await client.xrange(keys.stream_key(keys.tag(app.account), STREAM), count=WAITING)
            for _, entry in waiting:
                if entry["app"] == app.id:
                    needed.add(await client.hget(keys.deploy_key(app.account, entry["id"]), "source"))
        for path in stored[:-SOURCES] if len(waiting) < WAITING else []:
            if path.name.removesuffix(".tar.gz") not in needed:
                path.unlink(missing_ok=True)

    @staticmethod
    async def _receive(body: AsyncIterable[bytes], path: Path) -> None:
        size = 0
        with path.open("xb") as file:
            async with asyncio.timeout(SOURCE_SECONDS):
                async for part in body:
                    if not size and len(part) > 1 and not part.startswith(b"\x1f\x8b"):
                        raise RequestMalformed("The body must be a tar.gz of the app's source.")
                    size += len(part)
                    if size > SOURCE_BYTES:
                        raise RequestTooLarge(f"A source is at most {SOURCE_BYTES // 1_048_576} MiB, packed.")
                    file.write(part)
        if not size:
            raise RequestMalformed("The body is empty; send a tar.gz of the app's source.")

    def source_path(self, deploy: Deploy) -> Path:
        return self._source(deploy.appId, deploy.source)

    def _source(self, app_id: str, source: str) -> Path:
        return self._sources / app_id / f"{source}.tar.gz"

    async def forget_sources(self, app: App) -> None:
        """The stored source is cleaned up; a hook answers TARBALL_GONE from now on."""
        with backbone():
            await self._store.client.hdel(keys.site_key(app.account, app.id), "source")
        for path in (self._sources / app.id).glob("*.tar.gz"):
            path.unlink(missing_ok=True)

    async def forget(self, app: App) -> None:
        """The app is gone: it is live no more, and its sources go with it. Its hooks find no app."""
        await self.forget_sources(app)
        with backbone():
            await self._store.client.delete(keys.site_key(app.account, app.id))

    # -- reading ---------------------------------------------------------------------------------------------

    async def get(self, deploy_id: str, account_id: str) -> Deploy | None:
        with backbone():
            record = await self._store.client.hgetall(keys.deploy_key(account_id, deploy_id))
        return msgspec.convert(record, Deploy, strict=False) if record else None

    async def list(self, account_id: str, app: str | None, limit: int) -> list[Deploy]:
        """Newest first."""
        with backbone():
            ids = await self._store.client.zrevrange(keys.deploys_key(account_id), 0, -1 if app else limit - 1)
        found: list[Deploy] = []
        for deploy_id in ids:
            deploy = await self.get(deploy_id, account_id)
            if deploy is not None and app in (None, deploy.app, deploy.appId):
                found.append(deploy)
            if len(found) == limit:
                break
        return found

    async def queued(self) -> Sequence[Deploy]:
        """Of every account, the oldest of each partition first."""
        return [deploy for deploy in await self._of_stream() if deploy.state == "queued"]

    async def _of_stream(self) -> Sequence[Deploy]:
        """That wait or are under way."""
        found = []
        for tag in keys.partition_tags():
            with backbone():
                entries = await self._store.client.xrange(keys.stream_key(tag, STREAM), count=WAITING)
            for _, entry in entries:
                deploy = await self.get(entry["id"], entry["account"])
                if deploy is not None:
                    found.append(deploy)
        return found

    async def anyones(self, deploy_id: str) -> Deploy | None:
        """By id alone, for an outside engine: the id does not tell the account, so every partition is asked."""
        for tag in keys.partition_tags():
            with backbone():
                record = await self._store.client.hgetall(keys.tagged_deploy_key(tag, deploy_id))
            if record:
                return msgspec.convert(record, Deploy, strict=False)
        return None

    async def read_log(self, deploy: Deploy) -> str:
        return await self._store.get(keys.deploy_log_key(deploy.account, deploy.id)) or ""

    async def log(self, deploy: Deploy, text: str) -> None:
        """Appends; the log's beginning is what is kept, because the first error is the telling one."""
        key = keys.deploy_log_key(deploy.account, deploy.id)
        with backbone():
            length = await self._store.client.strlen(key)
            if length >= LOG_BYTES:
                return
            if length + len(text.encode()) >= LOG_BYTES:
                room = LOG_BYTES - length
                text = text.encode()[:room].decode(errors="ignore") + "\n… the log was cut here\n"
            await self._store.client.append(key, text)
            await self._store.client.expire(key, 90 * 86_400)

    # -- moving ----------------------------------------------------------------------------------------------

    async def start(self, deploy: Deploy) -> Deploy:
        """queued → building. Raises Moved."""
        if deploy.state != "queued":
            raise Moved
        return await self._move(deploy, state="building", startedAt=now_iso())

    async def give_back(self, deploy: Deploy) -> Deploy:
        """Its worker was stopped in good order: it waits again. Raises Moved."""
        return await self._move(deploy, state="queued")

    async def note(self, deploy: Deploy, *, commit: str) -> Deploy:
        return await self._move(deploy, state=deploy.state, commit=commit)

    async def advance(self, deploy: Deploy, phase: Phase, ok: bool, reason: str = "") -> Deploy:
        """A phase is over. Raises Moved, or RequestMalformed when the deploy is not in that phase."""
        state = NEXT.get((deploy.state, phase))
        if state is None:
            raise RequestMalformed(f"phase: a deploy that is {deploy.state} is not in its {phase} phase.")
        if not ok:
            return await self._fail(deploy, phase, reason or f"the {phase} phase failed")
        if state == "canary" and deploy.kind == "preview":
            state = "live"
        if state != "live":
            return await self._move(deploy, state=state, startedAt=deploy.startedAt or now_iso())
        account = await self._registry.account(deploy.account)
        url = f"https://{host(deploy.app, deploy.kind, deploy.branch, self._settings.apps_domain)}"
        ended = self._ended(deploy)
        event = DeploySucceeded(
            deployId=deploy.id,
            url=url,
            durationMs=int(ended["durationMs"]),
            kind=deploy.kind,
            plan=account.plan if account else None,
        )
        return await self._move(deploy, event, live=deploy.kind == "live", state="live", url=url, **ended)

    async def fail_abandoned(
        self, deploy: Deploy, reason: str = "the worker stopped in the middle of it; deploy again"
    ) -> Deploy:
        """Whoever made it is gone: what was half done is not taken up again."""
        phases: dict[str, Phase] = {"checking": "health", "canary": "canary"}
        return await self._fail(deploy, phases.get(deploy.state, "build"), reason)

    async def fail_unreported(self) -> int:
        """Those that an outside engine began and never ended; how many. Any number may do this at once."""
        failed, oldest = 0, now_iso(time.time() - ENGINE_SECONDS)
        for deploy in await self._of_stream():
            if deploy.state not in ("queued", "live", "failed") and (deploy.startedAt or "") < oldest:
                with contextlib.suppress(Moved):
                    reason = f"the engine told no end of it within {ENGINE_SECONDS // 3600:.0f} hours; deploy again"
                    await self.fail_abandoned(deploy, reason)
                    failed += 1
        return failed

    async def _fail(self, deploy: Deploy, phase: Phase, reason: str) -> Deploy:
        reason = reason[:REASON_LENGTH]
        event = DeployFailed(deployId=deploy.id, kind=deploy.kind, phase=phase, reason=reason)
        return await self._move(deploy, event, state="failed", error=f"{phase}: {reason}", **self._ended(deploy))

    @staticmethod
    def _ended(deploy: Deploy) -> dict[str, Any]:
        began = datetime.datetime.fromisoformat(deploy.startedAt or deploy.createdAt)
        now = datetime.datetime.now(datetime.UTC)
        return {"finishedAt": now_iso(), "durationMs": str(max(0, int((now - began).total_seconds() * 1000)))}

    async def _move(self, deploy: Deploy, event: Event | None = None, *, live: bool = False, **fields: Any) -> Deploy:
        tag = keys.tag(deploy.account)
        told = ["", "", "", "", ""]
        if event is not None:
            data = encode(event, deploy.appId, deploy.app).decode()
            told = [new_id("evt"), deploy.account, deploy.app, event.type, data]
        # Our worker acknowledges by itself.
        taken = self._settings.deploy_engine == "external" and fields.get("state") in ("live", "failed")
        with backbone():
            moved = await self._store.run(
                self._advance,
                [
                    keys.deploy_key(deploy.account, deploy.id),
                    keys.site_key(deploy.account, deploy.appId),
                    keys.stream_key(tag, STREAM),
                    *keys.event_keys(tag, deploy.account),
                ],
                deploy.state,
                "1" if taken else "",
                deploy.id if live else "",
                # Not of a source that was cleaned up meanwhile.
                deploy.source if live and deploy.source and self.source_path(deploy).exists() else "",
                *told,
                *[part for pair in fields.items() for part in pair],
            )
        if not moved:
            raise Moved
        after = await self.get(deploy.id, deploy.account)
        if after is None:
            raise BackboneUnavailable
        return after
