"""The folder of an app's data: whose files they are."""

import os
from pathlib import Path

import pytest

from tests.support.sandbox import ROOT
from workers.engine.app_data import AppData, give_files
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


def test_whether_it_runs(tmp_path: Path) -> None:
    data = AppData(tmp_path, "shop")
    assert not data.is_running
    with data.running("acc_1", MIB), data.running("acc_1", MIB):
        assert data.is_running
    assert not data.is_running
    with data.running("acc_1", MIB):  # the look has left no lock
        pass
