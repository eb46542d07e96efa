"""The folder of an app's data: whose files they are, and what is left of a change of them that is killed."""

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.folders import passable_folder
from tests.support.sandbox import ROOT
from workers.engine.app_data import AppData, give_files
from workers.engine.replacements import Replacements
from workers.sandbox.removal import remove_folder
from workers.sandbox.sandbox import MIB

USERS = range(61_196, 61_200)


def test_the_files_of_another_account_are_never_seen(tmp_path: Path) -> None:
    data = AppData(tmp_path, "shop")
    with data.running("acc_1", MIB):
        (data.files / "note").write_text("mine")
    with data.running("acc_2", MIB):
        assert os.listdir(data.files) == []
    assert data.account == "acc_2"
    assert (data.folder / "gone-acc_1" / "note").read_text() == "mine"


@pytest.mark.skipif(not ROOT, reason="only root can give files away")
def test_only_files_of_its_owners_are_given(tmp_path: Path) -> None:
    host, files = tmp_path / "host", tmp_path / "files"
    files.mkdir()
    host.write_text("the host's")
    os.link(host, files / "linked")  # no app can make this link
    (files / "own").touch()
    os.chown(files / "own", USERS[0], USERS[0])
    give_files(files, USERS[1], USERS)
    assert (files / "own").stat().st_uid == files.stat().st_uid == USERS[1]
    assert host.stat().st_uid == 0


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "A"])
def test_an_id_is_never_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not the id of an app"):
        AppData(tmp_path, name)


async def test_a_command_that_does_not_end_is_reported(tmp_path: Path) -> None:
    data = AppData(tmp_path, "shop", stop_seconds=0.1)
    with data.running("acc_1", MIB), pytest.raises(TimeoutError), data.stopped():
        pass
    assert not data.is_held


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
