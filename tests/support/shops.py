"""An app that a driver serves: the builder of its releases, and its visitors (`tests/workers/engine/`)."""

import asyncio
from collections.abc import Callable

from gateway.accounts.records import App
from gateway.deploys.release import Release
from gateway.deploys.serving import Records, Step, StepAnswer, Wanted
from gateway.redis.client import Store
from tests.support.background import cancel
from tests.support.engines import Engine
from tests.support.polling import wait_until

APP = App(id="shop", name="shop", account="acc_1", createdAt="2026-07-02T10:00:00.000Z")
HOST, PREVIEW = "shop.apps.test", "shop-preview.apps.test"
FIRST, SECOND, THIRD = "dep_1", "dep_2", "dep_3"
AGAIN = 4  # answers in a row, after which it is clear what visitors get
VISIT_SECONDS = 15.0  # after which a visitor gives up; no request is held for longer than 10


class Builder:
    """Makes releases, and writes the steps of their deploys as a builder does."""

    def __init__(self, engine: Engine, store: Store, app: App = APP, address: str = "live") -> None:
        self.engine, self.app, self.address, self.records = engine, app, address, Records(store)
        self._made: dict[str, Release] = {}

    async def make(
        self, deploy: str, *, runs: bool = True, overlap: bool = True, page: bool = True, health: str = ""
    ) -> None:
        self._made[deploy] = await self.engine.store_release(
            self.app, deploy, runs=runs, overlap=overlap, page=page, health=health
        )

    async def write(self, step: Step, deploy: str) -> Wanted:
        found = await self.records.read(self.app.account, self.app.id)
        before, former = found.get(self.address, ("", None))
        served = "" if former is None else former.served if former.deploy == deploy else former.serves
        releases = {name: self._made[name] for name in (served, deploy) if name and (name, step) != (deploy, "undo")}
        wanted = Wanted(self.app.account, self.app.id, self.address, step, deploy, served, releases)
        await self.records.write(before, wanted, "")
        return wanted

    async def until_answered(
        self, wanted: Wanted, holds: Callable[[StepAnswer | None], object] = bool, seconds: float = 30
    ) -> StepAnswer:
        found: StepAnswer = await wait_until(lambda: self.records.read_answer(wanted), seconds, holds=holds)
        return found

    async def step(self, step: Step, deploy: str) -> StepAnswer:
        return await self.until_answered(await self.write(step, deploy))

    async def watch(self, wanted: Wanted) -> StepAnswer:
        """Waits until a canary has failed, or has a good probe."""
        return await self.until_answered(wanted, lambda answer: answer and (answer.good_probes or not answer.ok))

    async def deploy(self, deploy: str) -> StepAnswer:
        """Goes through the steps. After one that fails, undoes them, and returns its answer."""
        answer = await self.step("check", deploy)
        if answer.ok:
            answer = await self.watch(await self.write("canary", deploy))
        if not answer.ok:
            await self.step("undo", deploy)
            return answer
        return await self.step("live", deploy)

    async def serve(self, deploy: str, *, overlap: bool = True) -> None:
        """Makes a release and deploys it."""
        await self.make(deploy, overlap=overlap)
        answer = await self.deploy(deploy)
        assert answer.ok, answer

    async def end(self) -> bool:
        """Ends a preview."""
        return await self.records.end(self.app.account, self.app.id, self.address)

    async def until_ended(self) -> None:
        await wait_until(
            lambda: self.records.read(self.app.account, self.app.id), holds=lambda found: self.address not in found
        )


class Visitors:
    """Visitors ask for the app all the time."""

    def __init__(self, engine: Engine, host: str = HOST) -> None:
        self._engine, self._host = engine, host
        self.answers: list[tuple[int, str]] = []
        self.waiting_may_be_refused = False
        self._asking: asyncio.Task[None] | None = None

    def come(self) -> None:
        self._asking = asyncio.create_task(self._ask())

    async def leave(self) -> None:
        """Nobody asks any more."""
        assert self._asking is not None
        await cancel(self._asking)

    async def _ask(self) -> None:
        while True:
            try:
                async with asyncio.timeout(VISIT_SECONDS):
                    self.answers.append(await self._engine.visit(self._host))
            except (OSError, EOFError) as error:
                self.answers.append((0, repr(error)))
            await asyncio.sleep(0.02)

    async def until(self, deploy: str) -> None:
        """Waits until all get this deploy's release."""
        await wait_until(lambda: self.answers[-AGAIN:], holds=lambda last: last == [(200, deploy)] * AGAIN)

    async def until_refused(self) -> None:
        """Waits until all are told that the app is suspended."""
        refused = [503] * AGAIN
        await wait_until(lambda: [status for status, _ in self.answers[-AGAIN:]], holds=lambda last: last == refused)
        self.forget()

    def forget(self) -> None:
        self.answers.clear()

    @property
    def pages(self) -> list[str]:
        """The deploys whose releases they got, in order. Nobody was refused, unless the waiting may be."""
        refused = [answer for answer in self.answers if answer[0] != 200]
        assert not refused or self.waiting_may_be_refused, refused
        pages = [page for status, page in self.answers if status == 200]
        return [page for page, former in zip(pages, ["", *pages], strict=False) if page != former]


class Shop:
    """An app whose first release is served."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self.engine, self.store, self.commands = engine, store, engine.commands
        self.builder, self.visitors = Builder(engine, store), Visitors(engine)
        self.preview = Builder(engine, store, address="preview")
        self.overlap = True

    async def open(self, *, runs: bool = True, overlap: bool = True) -> None:
        self.overlap = overlap
        self.engine.apps.append(APP)
        await self.engine.start()
        await self.builder.make(FIRST, runs=runs, overlap=overlap)
        assert (await self.builder.deploy(FIRST)).ok
        await self.until_only(FIRST)
        self.visitors.forget()

    async def begin(self, *steps: Step, runs: bool = True, overlap: bool = True) -> None:
        """Opens, makes the second release, and takes these steps of its deploy."""
        await self.open(runs=runs, overlap=overlap)
        await self.builder.make(SECOND, runs=runs, overlap=overlap)
        await self.go_on(*steps)

    async def go_on(self, *steps: Step, deploy: str = SECOND) -> None:
        for step in steps:
            answer = await self.builder.step(step, deploy)
            assert answer.ok, answer

    async def until_served(self, *deploys: str) -> None:
        """Waits until only the last one's release is left. Visitors must have got their releases in this order."""
        await self.until_only(deploys[-1])
        assert self.visitors.pages == [*deploys]
        if not self.overlap:
            self.require_one_at_a_time()
        if deploys[-1] == FIRST:
            await wait_until(lambda: self.engine.list_kept() == {FIRST})

    async def until_only(self, deploy: str) -> None:
        """Waits until nothing is served, runs or is kept but this deploy's release, and its predecessor's files."""
        await self.visitors.until(deploy)
        await wait_until(lambda: self.commands.running, holds=lambda running: running <= {deploy})
        await wait_until(lambda: not self.engine.is_holding())

    def require_one_at_a_time(self) -> None:
        assert all(len(commands) == 1 for commands in self.commands.together), self.commands.together

    async def restart(self) -> None:
        await self.engine.stop()
        await self.engine.start()
