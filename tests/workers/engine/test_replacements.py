"""Files are replaced: what is left of a change that is killed."""

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.folders import passable_folder
from workers.engine.app_data import AppData
from workers.engine.replacements import Replacements
from workers.sandbox.removal import remove_folder
from workers.sandbox.sandbox import MIB

NEVER = 1_000
KILLED = st.integers(1, 12) | st.just(NEVER)  # before which step


class Killed(BaseException):
    """The process has ended. It does nothing more."""


class Death:
    """Kills the process before one of its steps on the disk."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def before(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def take(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left <= 0:
                raise Killed
            return step(*arguments, **options)

        return take


class Changes(RuleBasedStateMachine):
    """Files are replaced and brought back by a process that may be killed, and is repeated by the next one."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(passable_folder())
        self.data = AppData(self._folder, "shop")
        self.data.prepare("acc_1", MIB)
        self.replacements = Replacements(self.data)
        self.files = set[str]()
        self.former: dict[str, set[str]] = {}  # by change that can be undone
        self._numbers = itertools.count()

    def teardown(self) -> None:
        self._stack.close()

    def _name(self) -> str:
        return f"{next(self._numbers)}"

    def _kill(self, steps: int, work: Callable[..., None], *arguments: Any) -> None:
        death = Death(steps)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            for name in ("mkdir", "rename", "rmdir", "unlink"):
                patch.setattr(os, name, death.before(getattr(os, name)))
            work(*arguments)

    def _change(self, steps: int, again: int, work: Callable[..., None], *arguments: Any) -> None:
        """Begins a change. Kills its process, and the next one when that recovers."""
        self._kill(steps, work, *arguments)
        self.data = AppData(self._folder, "shop")
        self.replacements = Replacements(self.data)
        self._kill(again, self.replacements.recover)
        self.replacements.recover()

    @rule()
    def write(self) -> None:
        for _ in range(2):
            (self.data.files / (name := self._name())).touch()
            self.files.add(name)

    @rule(steps=KILLED, again=KILLED)
    def replace(self, steps: int, again: int) -> None:
        change, before, fresh = self._name(), {*self.files}, {self._name(), self._name()}
        for kill in (steps, NEVER):
            if change not in self.replacements.changes:
                assert {*os.listdir(self.data.files)} == before
                incoming = self.data.folder / "incoming"
                remove_folder(incoming)
                incoming.mkdir()
                for name in fresh:
                    (incoming / name).touch()
                self._change(kill, again, self.replacements.replace, incoming, change)
        self.files, self.former[change] = fresh, before

    @rule(steps=KILLED, again=KILLED)
    def clear(self, steps: int, again: int) -> None:
        change, before = self._name(), {*self.files}
        for kill in (steps, NEVER):
            if change not in self.replacements.changes:
                assert {*os.listdir(self.data.files)} == before
                self._change(kill, again, self.replacements.clear, change)
        self.files = set()

    @precondition(lambda self: self.former)
    @rule(steps=KILLED, again=KILLED, data=st.data())
    def undo(self, steps: int, again: int, data: st.DataObject) -> None:
        change = data.draw(st.sampled_from(sorted(self.former)))
        for kill in (steps, NEVER, NEVER):
            self._change(kill, again, self.replacements.undo, change)
        self.files = self.former.pop(change)

    @precondition(lambda self: self.former)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        change = data.draw(st.sampled_from(sorted(self.former)))
        for _ in range(2):
            self.replacements.confirm(change)
            self.replacements.undo(change)
        del self.former[change]

    @invariant()
    def nothing_is_lost(self) -> None:
        assert {*os.listdir(self.data.files)} == self.files
        assert {*self.former} <= {*self.replacements.changes}
        for change, files in self.former.items():
            assert {*os.listdir(self.data.folder / f"replaced-{change}")} == files
        assert not self.data.is_held


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=60, stateful_step_count=12)
