"""Swaps, undos and their marks at one site in any order, by workers that may die in them: what is served, and runs."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from tests.support.folders import passable_folder
from tests.support.hosted_apps import Hosting
from tests.support.selection import with_more_in_test_all
from workers.hosting import releases
from workers.hosting.releases import KEPT_RELEASES, remove_folder, replace_link

NUMBERS = st.integers(0, 3) | st.integers(4, 7)  # of a release, counted from the newest


class Killed(Exception):
    """The worker was killed."""


@contextlib.contextmanager
def killed_in_link(number: int) -> Iterator[None]:
    """Kills the worker in the change of a link, if it makes so many. It leaves a link that is not in its place yet."""
    left = iter(range(number, -1, -1))

    def replace(path: Path, target: str) -> None:
        if next(left):
            return replace_link(path, target)
        path.with_name(f".{path.name}.new").symlink_to(target)
        raise Killed

    with mock.patch.object(releases, "replace_link", replace), contextlib.suppress(Killed):
        yield


class Releases(RuleBasedStateMachine):
    """Knows the four links of a site, the deploys with releases there, and those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.hosting = Hosting(self.stack.enter_context(passable_folder()))
        self.ids = map("dep_{:03}".format, itertools.count())
        self.site = self.hosting.site(self.hosting.deploy("dep"))
        self.current: str | None = None
        self.previous: str | None = None
        self.canary: str | None = None
        self.held: str | None = None
        self.kept: list[str] = []  # newest first
        self.running: set[str] = set()

    @initialize(times=st.sampled_from([2, KEPT_RELEASES + 2]))
    def deploy(self, times: int) -> None:
        for _ in range(times):
            self.build()
            self.swap(0, False, None)

    def teardown(self) -> None:
        self.stack.close()

    def pick(self, number: int) -> str:
        return self.kept[number % len(self.kept)]

    @rule()
    def build(self) -> None:
        deploy = next(self.ids)
        self.hosting.build(self.hosting.deploy(deploy), {"a": "1"}, start="node a")
        self.kept.insert(0, deploy)
        self.start(0)

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS, canary=st.booleans(), killed_in=st.none() | st.integers(0, 3))
    def swap(self, number: int, canary: bool, killed_in: int | None) -> None:
        deploy, before = self.pick(number), self.current
        if killed_in is not None:
            with killed_in_link(killed_in):
                self.site.swap(deploy, canary=canary)
            assert self.site.current in (before, deploy)
            assert before == deploy or self.site.current == before or not canary or self.site.unverified == deploy
        self.site.swap(deploy, canary=canary)  # again, as the next worker does
        if before != deploy:
            self.current, self.previous = deploy, before or self.previous
            self.canary = deploy if canary else self.canary

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS, killed=st.booleans())
    def undo(self, number: int, killed: bool) -> None:
        deploy = self.pick(number)
        if killed and self.replaced is not None:
            with killed_in_link(0):
                self.site.undo(deploy)
        assert self.site.undo(deploy) == (deploy == self.current)
        if deploy == self.current:
            self.current = self.replaced
            self.lift_marks(deploy)

    @property
    def replaced(self) -> str | None:
        return self.previous if self.previous != self.current and self.previous in self.kept else None

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS)
    def confirm(self, number: int) -> None:
        self.site.confirm(self.pick(number))
        self.lift_marks(self.pick(number))

    def lift_marks(self, deploy: str) -> None:
        self.held, self.canary = None, None if self.canary == deploy else self.canary

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS)
    def hold_requests(self, number: int) -> None:
        self.held = self.pick(number)
        self.site.hold_requests(self.held)

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS, before=st.booleans())
    def remove(self, number: int, before: bool) -> None:
        deploy = self.replaced if before and self.replaced is not None else self.pick(number)
        if deploy != self.current:
            self.running.discard(deploy)
            self.hosting.releases.stop(deploy)
            remove_folder(self.site.release(deploy))
            self.kept.remove(deploy)

    @rule()
    def prune(self) -> None:
        """The served release and the one that it replaced stay at any age."""
        self.site.prune()
        self.kept = [*self.kept[:KEPT_RELEASES], *({self.current, self.previous} & {*self.kept[KEPT_RELEASES:]})]
        self.kept.sort(reverse=True)
        self.running &= {*self.kept}

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS)
    def start(self, number: int) -> None:
        self.hosting.releases.run(self.site.release(self.pick(number)))
        self.running.add(self.pick(number))

    @rule(numbers=st.sets(NUMBERS, max_size=2))
    def tidy(self, numbers: set[int]) -> None:
        """What is served again if the canary or its deploy fails keeps running."""
        in_progress = {self.pick(number) for number in numbers} if self.kept else set()
        self.hosting.releases.tidy(set(), in_progress)
        unverified = self.current is not None and self.current in (self.canary, *in_progress)
        self.running &= in_progress | {self.current, self.previous if unverified else None}

    @invariant()
    def everything_is_as_expected(self) -> None:
        site = self.site
        assert site.current == self.current
        assert [path.name for path in site.releases()] == self.kept
        assert self.hosting.releases.releases_to_run() == {each: site.release(each) for each in self.running}
        unverified = self.current if self.canary == self.current else None
        assert site.unverified == unverified
        for deploy in self.kept:
            replaced = self.replaced if deploy == self.current else None
            assert site.find_replaced(deploy) == (replaced and site.release(replaced))
            stopped = self.current if self.held == deploy != self.current else None
            assert site.find_stopped(deploy) == (stopped and site.release(stopped))


@with_more_in_test_all("examples", 25, 100)
def test_each_order_of_changes(examples: int) -> None:
    run(Releases, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))
