"""Tells the viewers of an account which of its topics changed, so that pages and tools need not poll.

While somebody watches an account, this process reads marks of the account's records once per second, in one pipeline to
one node of Redis, whatever the number of viewers. A mark is a small value that changes with the record, such as the
newest entry of a log. Marks of single apps, of which an account may have many, are read every five seconds.

If Redis does not answer, the streams end. Viewers then reconnect, which checks their credentials again.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from gateway.accounts.registry import Registry
from gateway.errors import BackboneUnavailable
from gateway.ids import day_of
from gateway.keys import (
    account_apps_key,
    certificate_key,
    crashes_key,
    data_snapshots_key,
    data_status_key,
    deliveries_key,
    deploy_key,
    deploy_log_key,
    deploys_key,
    domain_check_key,
    findings_key,
    health_key,
    hooks_key,
    hooks_used_key,
    invitations_key,
    key_lists,
    members_key,
    partition_tag,
    requests_key,
    site_key,
    spend_key,
    webhook_key,
)
from gateway.loops import until_set

TOPICS = ("apps", "data", "deliveries", "deploys", "hooks", "keys", "members", "requests", "service", "usage")
READ_SECONDS = 1.0  # between two reads of an account
APP_READS = 5  # reads of an account for each read of its apps
MAX_APPS = 200  # of an account, whose marks are read
DEPLOYS = 20  # newest of an account, whose progress is read
COMMENT_SECONDS = 3.0  # of silence, after which a comment shows the page that the service is there
STREAM_SECONDS = 600.0  # after which the viewer reconnects, and the credential is checked again

Mark = tuple[str, Callable[[Any], object]]  # a topic, and the command that a pipeline gets


class Viewer:
    """The topics that one viewer has not been told of yet; None when the stream ends."""

    def __init__(self) -> None:
        self.changed: set[str] | None = set()
        self.woken = asyncio.Event()

    def tell(self, topics: Iterable[str] | None) -> None:
        if topics is None:
            self.changed = None
        elif self.changed is not None:
            self.changed |= set(topics)
        self.woken.set()


class Watch:
    """The viewers of one account, and the marks that were read last."""

    def __init__(self, account_id: str) -> None:
        self.account_id = account_id
        self.viewers: set[Viewer] = set()
        self.reading: asyncio.Task[None] | None = None
        self.deploys: list[str] = []  # the newest, as of the last read
        self.apps: list[str] = []  # the first ids, as of the last read
        self.marks: dict[str, tuple[str, Any]] = {}  # name → topic and value


class Changes:
    def __init__(self, registry: Registry, read_status: Callable[[], object]) -> None:
        self._registry, self._store, self._read_status = registry, registry.store, read_status
        self._watches: dict[str, Watch] = {}

    async def stream_events(self, account_id: str, is_draining: Callable[[], bool]) -> AsyncGenerator[bytes]:
        """Yields server-sent events for one viewer. The first, `ready`, means that later changes are reported."""
        watch = self._watches.setdefault(account_id, Watch(account_id))
        viewer = Viewer()
        watch.viewers.add(viewer)
        try:
            if watch.reading is None:
                await self._read(watch)  # finds the apps and deploys
                await self._read(watch)  # the marks with which later ones are compared
                watch.reading = watch.reading or asyncio.create_task(self._keep_reading(watch))
            yield _event("ready")
            clock = asyncio.get_running_loop().time
            spoke = clock()
            until = spoke + STREAM_SECONDS
            while viewer.changed is not None and not is_draining() and (now := clock()) < until:
                if viewer.changed:
                    topics, viewer.changed = sorted(viewer.changed), set()
                    yield b"".join(map(_event, topics))
                    spoke = now
                elif now - spoke > COMMENT_SECONDS:
                    yield b": waiting\n\n"
                    spoke = now
                viewer.woken.clear()
                await until_set(viewer.woken, READ_SECONDS)
        except BackboneUnavailable:
            return
        finally:
            watch.viewers.discard(viewer)
            if not watch.viewers:
                if watch.reading is not None:
                    watch.reading.cancel()
                if self._watches.get(account_id) is watch:
                    del self._watches[account_id]

    async def _keep_reading(self, watch: Watch) -> None:
        reads = 0
        try:
            while watch.viewers:
                await asyncio.sleep(READ_SECONDS)
                reads += 1
                changed = await self._read(watch, with_apps=reads % APP_READS == 0)
                if changed:
                    for viewer in watch.viewers:
                        viewer.tell(changed)
        except BackboneUnavailable:
            pass
        finally:
            # A new viewer gets a new watch.
            if self._watches.get(watch.account_id) is watch:
                del self._watches[watch.account_id]
            for viewer in watch.viewers:
                viewer.tell(None)

    async def _read(self, watch: Watch, *, with_apps: bool = True) -> list[str]:
        """Reads the marks, and returns the topics of which one changed. Raises BackboneUnavailable."""
        marks = {**_account_marks(watch), **(_app_marks(watch) if with_apps else {})}
        answers = await self._store.read_each(list(marks.values()), lambda pipe, mark: mark[1](pipe))
        found = {name: (topic, answer) for (name, (topic, _)), answer in zip(marks.items(), answers, strict=True)}
        watch.deploys = found["deploys"][1]
        apps = [await self._registry.app(name) for name in sorted(found["names"][1])[:MAX_APPS]]  # from memory
        watch.apps = [app.id for app in apps if app is not None]
        found["records"] = ("apps", [await self._registry.account(watch.account_id), apps])
        found["status"] = ("service", self._find_status())
        # The marks of a new app or deploy are read after the list that names it, and it may have changed in between.
        known = found if watch.reading is not None else watch.marks
        changed = {mark[0] for name, mark in found.items() if name in known and watch.marks.get(name) != mark}
        watch.marks = found if with_apps else {**watch.marks, **found}
        if "requests" in changed:  # the same script counts them
            changed.add("usage")
        return sorted(changed)

    def _find_status(self) -> object:
        try:
            return self._read_status()
        except BackboneUnavailable:
            return None


def _account_marks(watch: Watch) -> dict[str, Mark]:
    account = watch.account_id
    spend = spend_key(account, day_of(int(time.time() * 1000)))
    marks: dict[str, Mark] = {
        "names": ("apps", lambda pipe: pipe.smembers(account_apps_key(account))),
        "webhook": ("deliveries", lambda pipe: pipe.get(webhook_key(account))),
        "delivery": ("deliveries", lambda pipe: pipe.xrevrange(deliveries_key(account), count=1)),
        "deploys": ("deploys", lambda pipe: pipe.zrevrange(deploys_key(account), 0, DEPLOYS - 1)),
        "hooks": ("hooks", lambda pipe: pipe.hkeys(hooks_key(account))),
        "hooks used": ("hooks", lambda pipe: pipe.hgetall(hooks_used_key(account))),
        **{each: ("keys", _read_later("hkeys", each)) for each in key_lists(account)},
        "members": ("members", lambda pipe: pipe.get(members_key(account))),
        "invitations": ("members", lambda pipe: pipe.get(invitations_key(account))),
        "request": ("requests", lambda pipe: pipe.zrevrange(requests_key(account), 0, 0)),
        "spend": ("usage", lambda pipe: pipe.hmget(spend, ["settled", "reserved"])),
    }
    for deploy in watch.deploys:
        record, log = deploy_key(account, deploy), deploy_log_key(account, deploy)
        marks[f"deploy {deploy}"] = ("deploys", _read_later("hget", record, "state"))
        marks[f"log {deploy}"] = ("deploys", _read_later("strlen", log))
    return marks


def _app_marks(watch: Watch) -> dict[str, Mark]:
    account, tag = watch.account_id, partition_tag(watch.account_id)
    marks: dict[str, Mark] = {}
    for app in watch.apps:
        for kind in (health_key, findings_key, certificate_key, domain_check_key):
            key = kind(tag, app)
            marks[key] = ("apps", _read_later("hget", key, "version"))
        marks[f"crash {app}"] = ("apps", _read_later("xrevrange", crashes_key(tag, app), count=1))
        marks[f"live {app}"] = ("deploys", _read_later("hget", site_key(account, app), "live"))
        marks[f"data {app}"] = ("data", _read_later("get", data_status_key(account, app)))
        marks[f"snapshots {app}"] = ("data", _read_later("hgetall", data_snapshots_key(account, app)))
    return marks


def _read_later(command: str, *args: Any, **options: Any) -> Callable[[Any], object]:
    return lambda pipe: getattr(pipe, command)(*args, **options)


def _event(topic: str) -> bytes:
    return f"event: {topic}\ndata: {topic}\n\n".encode()
