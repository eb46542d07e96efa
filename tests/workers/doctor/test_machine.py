"""The rows about the machine."""

import resource
import tempfile
from pathlib import Path

import pytest

from gateway.settings import ProviderSettings, Settings
from tests.support.folders import passable_folder
from workers.doctor import machine
from workers.doctor.row import Row


async def test_a_disk_that_does_not_say_how_large_it_is() -> None:
    rows = {row.check: row async for row in machine.check_storage(Settings(data_dir="/proc/capsule"))}
    assert (rows["disk"].state, rows["disk"].detail) == ("warn", "the file system does not say how large it is")
    assert rows["disk"].action


async def check_temporary_files() -> Row:
    (row,) = [row async for row in machine.check_temporary_files(Settings())]
    return row


async def test_a_folder_for_temporary_files_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)  # otherwise Python remembers the folder
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert await check_temporary_files() == Row("temporary files", "ok", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    row = await check_temporary_files()
    assert (row.state, "TMPDIR" in row.detail, "missing" in row.detail) == ("fail", True, True)


@pytest.mark.parametrize(("hard", "state"), [(1_024, "warn"), (16_384, "ok"), (resource.RLIM_INFINITY, "ok")])
async def test_a_low_limit_of_open_files(hard: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, hard))
    (row,) = [row async for row in machine.check_open_files(Settings())]
    assert (row.state, "LimitNOFILE" in row.action) == (state, state == "warn")


async def secret_files(settings: Settings) -> list[tuple[str, str]]:
    return [(row.state, row.detail) async for row in machine.check_secret_files(settings)]


async def test_secrets_that_others_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with passable_folder() as folder:
        monkeypatch.chdir(folder)
        assert await secret_files(Settings()) == [("ok", "other users can read none")]
        files = {name: folder / name for name in (".env", "provider-key", "client-secret", "smtp", "redis.pem")}
        for file in files.values():
            file.write_text("x")
            file.chmod(0o600)
        settings = Settings(
            redis_url=f"rediss://localhost:6379/0?ssl_keyfile={files['redis.pem']}",
            providers_file=(
                ProviderSettings(url="https://a", region="x", key_file=str(files["provider-key"]), models={"m": "m"}),
            ),
            oidc_client_secret_file=str(files["client-secret"]),
            smtp_url_file=str(files["smtp"]),
        )
        assert await secret_files(settings) == [("ok", "other users can read none")]
        for name, file in files.items():
            shown = name if name == ".env" else str(file)
            file.chmod(0o644)
            assert await secret_files(settings) == [("warn", f"{shown}: every user of this machine can read it")]
            file.chmod(0o666)
            assert await secret_files(settings) == [("warn", f"{shown}: every user of this machine can change it")]
            folder.chmod(0o700)  # nobody else comes to the file
            assert await secret_files(settings) == [("ok", "other users can read none")]
            folder.chmod(0o711)
            file.chmod(0o640)
        files["smtp"].unlink()
        assert await secret_files(settings) == [("fail", f"{files['smtp']}: No such file or directory")]
