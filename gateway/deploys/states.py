"""Deploys: the daily quota, the queue, and the states that a deploy goes through.

    queued → building → checking → canary → live        a preview goes from checking to live
       │          ╰───────┴──────────┴─────→ failed
       ╰──────────╯
             ╰─────────────────────────────→ canceled   without an event; on a suspension from any state before live

A deploy that reuses the release of an earlier one (a rollback, a promotion) goes the same way without a build. At most
one deploy of an address is queued; a newer one replaces it.

One script changes the state with a compare-and-set, queues the event that follows from it, and sets which deploy the
address serves. So every deploy ends once and sends one event, whether the built-in worker or an external engine
runs it.
"""

import contextlib
import datetime
import time
from collections.abc import AsyncIterable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gateway.accounts.records import Account, App, find_suspension
from gateway.accounts.registry import Registry
from gateway.cancellation import finish_despite_cancellation
from gateway.deploys import scripts
from gateway.deploys.addresses import address, host, url_of
from gateway.deploys.hooks import TRIGGERS_PER_MINUTE, Hook
from gateway.deploys.manifest import FILE as MANIFEST
from gateway.deploys.phases import PHASES
from gateway.deploys.records import (
    FINAL,
    MAX_LISTED,
    SCAN_LIMIT,
    STREAM,
    Deploy,
    DeployRecords,
    Origin,
    State,
    Trigger,
)
from gateway.deploys.scripts import Transition
from gateway.deploys.sources import Format, Sources
from gateway.errors import (
    AppSuspended,
    BackboneUnavailable,
    DeployQuotaReached,
    HookRateLimited,
    NoDeployYet,
    NotFound,
    RequestMalformed,
    ServiceError,
    StorageUnavailable,
    TarballGone,
)
from gateway.events.catalog import DeployFailed, DeploySucceeded, Event, Kind, Phase, prepare_event
from gateway.ids import new_id, now_iso
from gateway.keys import (
    deploy_key,
    deploys_on_key,
    partition_tag,
    previews_key,
    served_apps_key,
    serving_key,
    site_key,
    stream_key,
)
from gateway.settings import Settings
from gateway.storage import Object, is_full, open_storage

logger = structlog.get_logger()

EXTERNAL_SECONDS = 7_200.0  # from an external engine's first report to its last
REASON_LENGTH = 500  # characters
CANCEL_ATTEMPTS = 10  # each fails only if the deploy has changed its state

# (state, phase that succeeded) → next state
NEXT: dict[tuple[str, str], State] = {
    ("queued", "build"): "checking",
    ("building", "build"): "checking",
    ("checking", "health"): "canary",
    ("canary", "canary"): "live",
}


class StaleDeploy(Exception):
    """The deploy has changed its state since it was read."""


class DeployError(Exception):
    """A reason for the failure of a deploy. Account holders see the message.

    `service_fault`: the service has failed, not the app, so the same deploy may succeed later.
    """

    def __init__(self, message: str, *, service_fault: bool = False) -> None:
        super().__init__(message)
        self.service_fault = service_fault


class StorageFailed(DeployError):
    """The storage does not answer, or a disk is full."""

    def __init__(self, error: Exception) -> None:
        reason = "the disk of the service is full" if is_full(error) else "the storage does not answer"
        super().__init__(f"{reason}; deploy again later", service_fault=True)


class AppGone(DeployError):
    def __init__(self) -> None:
        super().__init__("the app was deleted, or now belongs to another account")


class Deploys:
    def __init__(self, settings: Settings, registry: Registry, records: DeployRecords) -> None:
        self._settings, self._registry, self._store, self._records = settings, registry, registry.store, records
        self._sources = Sources(open_storage(settings), Path(settings.data_dir) / "uploads")

    # -- queueing --------------------------------------------------------------------------------------------

    async def queue(
        self,
        app: App,
        trigger: Trigger,
        origin: Origin,
        *,
        kind: Kind = "live",
        source: str = "",
        hook: Hook | None = None,
        reuse: Deploy | None = None,
        restores: str | None = None,
    ) -> str:
        """Queues a deploy and returns its id. Raises a ServiceError if the deploy is refused.

        `reuse` is the deploy whose release to serve again. `restores` is the storage's key of a snapshot to restore.
        """
        account = await self._find_account(app)
        deploy_id, now = new_id("dep"), now_iso()
        record = {
            "id": deploy_id,
            "account": account.id,
            "app": app.name,
            "appId": app.id,
            "kind": kind,
            "trigger": trigger,
            "createdAt": now,
            **_list_fields(origin),
            **({} if restores is None else {"restores": restores}),
            **({} if reuse is None else {"release": reuse.id}),
        }
        reply = await scripts.queue_deploy(
            self._store,
            account.id,
            app.id,
            deploy_id,
            record,
            address=address(kind, origin.branch),
            now=now,
            hook=hook.id if hook else "",
            hook_limit=TRIGGERS_PER_MINUTE,
            suspended=find_suspension(app, account) is not None,
            quota=self._settings.deploy_quotas[account.plan],
            source=source if reuse is None else reuse.source,
            has_repository=app.repository is not None or reuse is not None,
        )
        if reply.verdict != "queued":
            raise self._build_refusal(reply.verdict, reply.retry_in)
        await self._cancel_if_suspended(app, deploy_id)
        return deploy_id

    async def require_active(self, app: App) -> Account:
        """Returns the app's account. Raises AppSuspended if the app or its account is suspended, and NotFound."""
        account = await self._find_account(app)
        if find_suspension(app, account) is not None:
            raise AppSuspended
        return account

    async def _find_account(self, app: App) -> Account:
        account: Account | None = await self._registry.account(app.account)
        if account is None:
            raise NotFound
        return account

    async def _cancel_if_suspended(self, app: App, deploy_id: str) -> None:
        """Cancels a deploy that was queued while its app was being suspended. Raises AppSuspended.

        The records are read without the cache: either this finds the suspension, or the suspension finds the deploy.
        """
        owned = (await self._registry.read_apps([app.id])).get(app.id)
        if owned is not None and find_suspension(*owned) is not None:
            deploy = await self._records.get(deploy_id, app.account)
            if deploy is not None:
                await self.end_as_canceled(deploy, "the app was suspended")
            raise AppSuspended

    @staticmethod
    def _build_refusal(verdict: str, wait: int) -> ServiceError:
        match verdict:
            case "rate":
                return HookRateLimited(retry_after=wait / 1_000_000)
            case "suspended":
                return AppSuspended()
            case "never-live":
                return NoDeployYet()
            case "source-gone":
                return TarballGone()
            case "full":
                return BackboneUnavailable(
                    "Too many deploys are waiting; this one was not queued. Try again in a minute."
                )
            case _:
                return DeployQuotaReached(retry_after=86_400 - time.time() % 86_400)

    async def count_today(self, account_id: str, day: str) -> int:
        return int(await self._store.get(deploys_on_key(account_id, day)) or 0)

    async def clear_build_cache(self, app: App) -> None:
        """Makes the app's next builds begin without a cache, on every builder."""
        await self._store.client.hset(site_key(app.account, app.id), "cache", new_id("clr"))

    async def find_cache_clearing(self, app: App) -> str:
        """Returns the id of the last clearing of the app's build cache; '' for none."""
        return await self._store.client.hget(site_key(app.account, app.id), "cache") or ""

    # -- stored sources --------------------------------------------------------------------------------------

    async def publish(
        self,
        app: App,
        body: AsyncIterable[bytes],
        trigger: Trigger,
        origin: Origin,
        *,
        kind: Kind = "live",
        size: int | None = None,
        declared: Format | None = None,
    ) -> str:
        """Stores a source, queues a deploy of it, and returns the deploy's id.

        `size` and `declared` are the size and the format that the request declares. A refused deploy leaves nothing
        stored. When the day's deploys are used up, or the app is suspended, the body is not read.
        """
        await self._require_quota(app)
        source = await self._sources.receive(app, body, size, declared)
        try:
            deploy_id = await self.queue(app, trigger, origin, kind=kind, source=source)
        except BaseException:
            await finish_despite_cancellation(self._sources.remove(app.id, {source}))
            raise
        with contextlib.suppress(StorageUnavailable):  # the next upload removes them
            await self._prune_sources(app)
        return deploy_id

    async def _require_quota(self, app: App) -> None:
        """Raises DeployQuotaReached and AppSuspended.

        This only avoids an upload in vain: the script that queues the deploy decides.
        """
        account = await self.require_active(app)
        day = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        if await self.count_today(account.id, day) >= self._settings.deploy_quotas[account.plan]:
            raise self._build_refusal("quota", 0)

    async def open_source(self, deploy: Deploy) -> Object | None:
        """Opens the stored source; None if the deploy has none. Raises StorageUnavailable."""
        return await self._sources.open(deploy.appId, deploy.source) if deploy.source else None

    async def has_source(self, deploy: Deploy) -> bool:
        """Returns whether the source is stored. True while the storage is away: the build reports a missing source."""
        try:
            return bool(deploy.source) and await self._sources.exists(deploy.appId, deploy.source)
        except StorageUnavailable:
            return True

    async def _prune_sources(self, app: App) -> None:
        """Removes old sources, except the live deploy's and those of queued deploys."""
        old = await self._sources.list_old(app.id)
        if not old:
            return
        client = self._store.client
        needed = {await client.hget(site_key(app.account, app.id), "source")}
        waiting = await client.xrange(stream_key(partition_tag(app.account), STREAM), count=SCAN_LIMIT)
        for _, entry in waiting:
            if entry.get("app") == app.id and "id" in entry:
                needed.add(await client.hget(deploy_key(app.account, entry["id"]), "source"))
        if len(waiting) < SCAN_LIMIT:  # else entries that were not read may need one of them
            await self._sources.remove(app.id, set(old) - needed)

    async def forget_sources(self, app: App) -> None:
        """Removes the app's stored sources. Its hooks answer TARBALL_GONE until the next publish."""
        await self._store.client.hdel(site_key(app.account, app.id), "source")
        await self._sources.remove_all(app.id)

    async def forget_app(self, app: App) -> None:
        """Cancels the deploys of a deleted app, and removes its stored sources and its live deploy."""
        for deploy in await self._records.list(app.account, app.id, MAX_LISTED):
            if deploy.state in ("queued", "building"):
                with contextlib.suppress(StaleDeploy):
                    await self.cancel(deploy, "the app was deleted")
        try:
            await self.forget_sources(app)
        except StorageUnavailable:
            logger.error("deploys.sources_left", app=app.id, action=f"delete sources/{app.id} in the storage")
        await self._forget_site(app.account, app.id)

    async def _forget_site(self, account_id: str, app_id: str) -> None:
        await self._store.client.delete(site_key(account_id, app_id), serving_key(account_id, app_id))
        await self._store.client.zrem(served_apps_key(partition_tag(account_id)), app_id)
        previews = await self._store.client.zrange(previews_key(account_id), 0, -1)
        if ended := [member for member in previews if member.startswith(f"{app_id} ")]:
            await self._store.client.zrem(previews_key(account_id), *ended)

    # -- state changes: each raises StaleDeploy --------------------------------------------------------------

    async def start(self, deploy: Deploy) -> Deploy:
        """Moves a deploy from queued to building."""
        if deploy.state != "queued":
            raise StaleDeploy
        return await self._move(deploy, state="building", startedAt=now_iso())

    async def requeue(self, deploy: Deploy) -> Deploy:
        """Queues a deploy again whose worker was stopped properly."""
        return await self._move(deploy, state="queued")

    async def cancel(self, deploy: Deploy, reason: str) -> Deploy:
        """Cancels a deploy that is queued or building. The worker that builds it notices, and ends the build."""
        if deploy.state not in ("queued", "building"):
            raise StaleDeploy
        return await self._move(deploy, state="canceled", error=reason, **self._final_timing(deploy))

    async def cancel_unfinished(self, account_id: str, app_id: str | None, reason: str) -> None:
        """Cancels all deploys of the account, or of one app, that are queued or in progress."""
        for deploy in await self._records.list(account_id, app_id, MAX_LISTED):
            await self.end_as_canceled(deploy, reason)

    async def end_as_canceled(self, deploy: Deploy, reason: str) -> None:
        """Cancels a deploy in any state but a final one. The worker that makes it notices, and undoes it."""
        found: Deploy | None = deploy
        for _ in range(CANCEL_ATTEMPTS):
            if found is None or found.state in FINAL:
                return
            with contextlib.suppress(StaleDeploy):
                await self._move(found, state="canceled", error=reason, **self._final_timing(found))
                return
            found = await self._records.get(deploy.id, deploy.account)
        raise BackboneUnavailable("A deploy's state keeps changing; try again.")

    async def record_commit(self, deploy: Deploy, cloned: Origin, warning: str) -> Deploy:
        """Records what was cloned, and what it lacks."""
        found: dict[str, Any] = {**_list_fields(cloned), **({"warning": warning} if warning else {})}
        if deploy.kind == "preview" and deploy.branch is None:
            found.pop("branch", None)  # its address would follow from the branch, and it was built for another one
        return await self.record(deploy, **found)

    async def record(self, deploy: Deploy, **fields: Any) -> Deploy:
        """Writes fields of a deploy that keeps its state."""
        return await self._move(deploy, state=deploy.state, **fields)

    async def advance(
        self, deploy: Deploy, phase: Phase, ok: bool, reason: str = "", *, service_fault: bool = False
    ) -> Deploy:
        """Records the result of a phase. Raises RequestMalformed when the deploy is not in that phase."""
        state = NEXT.get((deploy.state, phase))
        if state is None:
            raise RequestMalformed(f"phase: a deploy that is {deploy.state} is not in its {phase} phase.")
        if not ok:
            return await self._fail(deploy, phase, reason or f"the {phase} phase failed", service_fault=service_fault)
        if state == "canary" and deploy.kind == "preview":
            state = "live"
        if state == "live":
            return await self._go_live(deploy)
        now = now_iso()
        began: dict[str, Any] = {f"{state}At": now}
        return await self._move(deploy, state=state, startedAt=deploy.startedAt or now, **began)

    async def _go_live(self, deploy: Deploy) -> Deploy:
        account = await self._registry.account(deploy.account)
        name = host(deploy.app, deploy.kind, deploy.branch, self._settings.apps_domain)
        timing = self._final_timing(deploy)
        event = DeploySucceeded(
            deployId=deploy.id,
            url=f"https://{name}",
            durationMs=int(timing["durationMs"]),
            kind=deploy.kind,
            plan=account.plan if account else msgspec.UNSET,
        )
        url = url_of(name, self._settings)
        live = await self._move(deploy, event, live=deploy.kind == "live", state="live", url=url, **timing)
        if await self._registry.find_app(deploy.appId) is None:  # deleted meanwhile, so nothing else removes its site
            await self._forget_site(deploy.account, deploy.appId)
        return live

    async def fail_abandoned(
        self, deploy: Deploy, reason: str = "the worker stopped during the deploy; deploy again"
    ) -> Deploy:
        """Fails a deploy whose worker or engine is gone. An unfinished deploy is not resumed."""
        return await self._fail(deploy, PHASES.get(deploy.state, "build"), reason, service_fault=True)

    async def fail_unreported(self) -> int:
        """Fails deploys that an external engine started and did not finish in time; returns their number.

        Several processes can do this at once.
        """
        failed, oldest = 0, now_iso(time.time() - EXTERNAL_SECONDS)
        reason = f"the engine reported no result within {EXTERNAL_SECONDS // 3600:.0f} hours; deploy again"
        for deploy in await self._records.list_in_progress():
            if deploy.state not in ("queued", *FINAL) and (deploy.startedAt or "") < oldest:
                with contextlib.suppress(StaleDeploy):
                    await self.fail_abandoned(deploy, reason)
                    failed += 1
        return failed

    async def _fail(self, deploy: Deploy, phase: Phase, reason: str, *, service_fault: bool) -> Deploy:
        reason = reason[:REASON_LENGTH]
        event = DeployFailed(deployId=deploy.id, kind=deploy.kind, phase=phase, reason=reason)
        error = reason if reason.startswith(f"{MANIFEST}, line ") else f"{phase}: {reason}"
        fault: dict[str, Any] = {"serviceFault": "1"} if service_fault else {}
        return await self._move(deploy, event, state="failed", error=error, **fault, **self._final_timing(deploy))

    @staticmethod
    def _final_timing(deploy: Deploy) -> dict[str, Any]:
        began = datetime.datetime.fromisoformat(deploy.startedAt or deploy.createdAt)
        now = datetime.datetime.now(datetime.UTC)
        return {"finishedAt": now_iso(), "durationMs": str(max(0, int((now - began).total_seconds() * 1000)))}

    async def _move(self, deploy: Deploy, event: Event | None = None, *, live: bool = False, **fields: Any) -> Deploy:
        """Writes `fields` and queues the event, if the deploy is still in the state in which it was read."""
        queued = None
        if event is not None:
            queued = prepare_event(event, new_id("evt"), deploy.account, deploy.appId, deploy.app)
        transition = Transition(
            account=deploy.account,
            app=deploy.appId,
            deploy=deploy.id,
            expected=deploy.state,
            fields=fields,
            event=queued,
            # The worker acknowledges the entry of a deploy that it has started.
            dequeue=fields.get("state") in FINAL
            and (self._settings.deploy_engine == "external" or deploy.state == "queued"),
            live=live,
            # A source that was removed in the meantime must not be named again.
            source=deploy.source if live and await self.has_source(deploy) else "",
        )
        if not await scripts.advance_deploy(self._store, transition):
            raise StaleDeploy
        after = await self._records.get(deploy.id, deploy.account)
        if after is None:
            raise BackboneUnavailable
        return after


def _list_fields(origin: Origin) -> dict[str, str]:
    """Returns the fields of a deploy's record that have a value."""
    fields = msgspec.structs.asdict(origin)
    return {name: str(value) for name, value in fields.items() if value is not None}
