"""Real start commands in the real sandbox: Node servers that describe their environment."""

import asyncio
import base64
import contextlib
import itertools
import os
import secrets
import signal
from pathlib import Path

import msgspec
import pytest

from gateway.accounts.vault import Vault
from gateway.deploys.line_times import FORMER, split_stamp
from tests.support.hosted_apps import Hosting
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.sandbox import marked
from tests.support.watched_apps import Watch
from workers.engine.health import Listening
from workers.hosting import watchdog as watchdog_module
from workers.hosting.release_files import write_environment
from workers.hosting.sleep import ask_listening
from workers.hosting.watchdog import LIMITS, AppState, Watchdog, control_path, output_path
from workers.sandbox.keeper import CADDY_USER
from workers.sandbox.sandbox import MIB, Sandbox


def test_links_that_are_being_made_are_not_leftovers(hosting: Hosting) -> None:
    running = hosting.releases.running
    (running / ".dep_1.new").symlink_to("dep_1")
    (running / "dep_0.scratch").mkdir()
    Watchdog(hosting.folder, Sandbox(development=True, users=Watch.users), ignore_crash)._remove_leftovers()
    assert os.listdir(running) == [".dep_1.new"]


async def ignore_crash(*_: object) -> None:
    pass


def read_output(hosting: Hosting, deploy_id: str) -> str:
    """Returns what a start command has written, without the times of its lines."""
    lines = output_path(hosting.folder, deploy_id).read_text().splitlines(keepends=True)
    return "".join(split_stamp(line)[1] for line in lines)


@pytest.mark.parametrize("address", ["127.0.0.1:9999", "0.0.0.0:9999", "[::]:9999", "[::1]:8080", "127.0.0.2:8080"])
async def test_the_relay_says_where_an_app_listens_instead(watch: Watch, address: str) -> None:
    host, _, port = address.rpartition(":")
    script = f"require('net').createServer().listen({port}, '{host.strip('[]')}')"
    watch.publish("dep_1", f'exec node -e "{script}"')
    watch.start()

    async def find_listening() -> Listening | None:
        with contextlib.suppress(OSError):
            return msgspec.json.decode(await ask_listening(control_path(watch.hosting.folder, "dep_1")), type=Listening)
        return None

    found = await wait_until(find_listening, 20, holds=lambda found: found and found.addresses)
    assert found == Listening(8080, False, [address])


async def test_only_crashes_of_live_releases_are_reported(watch: Watch) -> None:
    watch.publish("dep_1")
    watch.publish("dep_2", kind="preview")
    watch.build("dep_3")  # still being checked
    watch.start()
    for deploy_id in ("dep_2", "dep_3", "dep_1"):
        await watch.end(deploy_id, "/exit")
        await wait_until(lambda deploy_id=deploy_id: watch.state(deploy_id).exits == 1, 20)
        assert await watch.ask(deploy_id) == f"release {deploy_id}", "started again"
        assert watch.state(deploy_id).last == "the start command ended with status 3"
    assert watch.crashes == [("shop", "exit", 3)]
    await watch.end("dep_1", "/kill")
    await wait_until(lambda: len(watch.crashes) == 2, 20)
    assert watch.crashes[1] == ("shop", "exit", 137)


async def test_running_out_of_memory_is_reported(watch: Watch) -> None:
    watch.limits = LIMITS.__class__(memory=96 * MIB, grace=1)
    watch.publish("dep_1")
    watch.start()
    await watch.end("dep_1", "/eat")
    await wait_until(lambda: watch.crashes, 20)
    assert watch.crashes[0][:2] == ("shop", "oom")
    assert "out of memory" in watch.state("dep_1").last
    assert await watch.ask("dep_1") == "release dep_1"


async def test_the_pause_grows(watch: Watch, hosting: Hosting) -> None:
    watch.publish("dep_1", "echo once; exit 7")
    times: list[float] = []

    async def crashed(*_: object) -> None:
        times.append(asyncio.get_running_loop().time())

    watch.crashed = crashed  # type: ignore[method-assign]
    watch.start()
    await wait_until(lambda: len(times) == 3, 30)
    pauses = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert [pause > least for pause, least in zip(pauses, (0.1, 0.2), strict=True)] == [True] * 2
    assert read_output(hosting, "dep_1") == "once\n" * 3


async def test_an_app_that_is_stopped_on_purpose_has_not_crashed(watch: Watch) -> None:
    """It finishes the requests in progress, which may take longer than the app's grace period."""
    watch.limits = LIMITS.__class__(memory=LIMITS.memory, grace=0.1)
    watch.publish("dep_1")
    watch.publish("dep_2", app_id="other")
    watch.start()
    for deploy_id in ("dep_1", "dep_2"):
        await watch.ask(deploy_id)
    keeper = watch.state("dep_1").keeper
    under_way = [asyncio.create_task(watch.get("dep_1", "/slow")) for _ in range(8)]
    await asyncio.sleep(0.2)
    watch.hosting.releases.stop("dep_1")
    assert await asyncio.gather(*under_way) == ["slow"] * 8
    await wait_until(lambda: not Path(f"/proc/{keeper}").exists(), 20)
    await wait_until(lambda: watch.state("dep_1") == AppState(), 20)
    assert await watch.ask("dep_2") == "release dep_2"
    assert watch.crashes == []


async def test_an_app_that_must_stop_soon_does_not_wait_for_open_connections(watch: Watch) -> None:
    """Requests for the next release wait meanwhile."""
    watch.publish("dep_1")
    watch.start()
    await watch.ask("dep_1")
    keeper = watch.state("dep_1").keeper
    _, writer = await asyncio.open_unix_connection(watch.state("dep_1").socket)
    watch.hosting.releases.stop_soon("dep_1")
    await wait_until(lambda: not Path(f"/proc/{keeper}").exists(), 10)
    await wait_until(lambda: not watch.hosting.releases.is_stopping("dep_1"), 10)
    writer.close()
    assert watch.crashes == []


async def test_an_app_that_was_stopped_is_not_started_again(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch.publish("dep_1")
    watch.start()
    await watch.ask("dep_1")
    keeper = watch.state("dep_1").keeper
    with monkeypatch.context() as patch:
        patch.setattr(Watchdog, "_find_releases", lambda self: self._wanted)  # the watchdog has not noticed it yet
        watch.hosting.releases.stop("dep_1")
        await wait_until(lambda: not Path(f"/proc/{keeper}").exists(), 20)
        await asyncio.sleep(1)
    assert read_output(watch.hosting, "dep_1") == "starting\n"


# -- apps outlive the watchdog -------------------------------------------------------------------------------


async def test_a_new_watchdog_adopts_the_running_apps(watch: Watch) -> None:
    watch.publish("dep_1")
    watch.publish("dep_2", app_id="other")
    watch.start()
    assert await watch.ask("dep_1", "/write") == "kept"
    before = await watch.ask("dep_1", "/born"), await watch.ask("dep_2", "/born")
    await watch.stop()
    assert await watch.get("dep_1", "/born") == before[0], "it runs without a watchdog"
    watch.hosting.releases.stop("dep_2")
    keeper = watch.state("dep_2").keeper
    await wait_until(lambda: not Path(f"/proc/{keeper}").exists(), 15)
    watch.start()
    await wait_until(lambda: not [*watch.hosting.releases.running.glob("dep_2*")], 20)
    assert await watch.ask("dep_1", "/born") == before[0]
    await watch.end("dep_1", "/exit")
    await wait_until(lambda: watch.crashes, 20)
    assert watch.crashes == [("shop", "exit", 3)]
    assert (born := await watch.ask("dep_1", "/born")) != before[0]
    os.kill(watch.state("dep_1").keeper, signal.SIGKILL)  # the kernel kills the app with it
    await wait_until(lambda: len(watch.crashes) == 2, 20)
    assert await watch.ask("dep_1", "/born") != born


async def test_a_release_that_is_stopped_and_served_again_has_not_crashed(watch: Watch) -> None:
    watch.publish("dep_1")
    watch.start()
    before = await watch.ask("dep_1", "/born")
    keeper = watch.state("dep_1").keeper
    release = (watch.hosting.releases.running / "dep_1").resolve()
    watch.hosting.releases.stop("dep_1")
    await wait_until(lambda: not Path(f"/proc/{keeper}").exists(), 20)
    watch.hosting.releases.run(release)
    await wait_until(lambda: watch.state("dep_1").keeper not in (0, keeper), 15)
    assert await watch.ask("dep_1", "/born") != before
    assert (watch.crashes, watch.state("dep_1").exits) == ([], 0)


async def test_a_release_that_is_served_again_before_its_keeper_notices_is_watched_again(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed, clean_up = asyncio.Event(), Watchdog._clean_up

    async def notice_and_clean_up(watchdog: Watchdog, release: Path) -> None:
        noticed.set()
        await clean_up(watchdog, release)

    monkeypatch.setattr(Watchdog, "_clean_up", notice_and_clean_up)
    watch.publish("dep_1")
    watch.start()
    born = await watch.ask("dep_1", "/born")
    keeper = watch.state("dep_1").keeper
    release = (watch.hosting.releases.running / "dep_1").resolve()
    os.kill(keeper, signal.SIGSTOP)
    watch.hosting.releases.stop("dep_1")
    await asyncio.wait_for(noticed.wait(), PATIENCE_SECONDS)
    watch.hosting.releases.run(release)
    os.kill(keeper, signal.SIGCONT)
    assert await watch.ask("dep_1", "/born") == born
    await watch.end("dep_1", "/exit")
    await wait_until(lambda: watch.crashes, 20)
    assert watch.crashes == [("shop", "exit", 3)]


async def test_a_crash_without_a_watchdog_is_reported_unless_the_machine_has_ended_the_app(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker compose restart` kills the keepers too. The next watchdog starts the apps, and tells nobody."""

    async def end_without_watchdog(*, with_machine: bool) -> None:
        keeper = watch.state("dep_1").keeper
        await watch.stop()
        if with_machine:
            os.kill(keeper, signal.SIGKILL)
            monkeypatch.setattr(watchdog_module, "identify_boot", lambda: "the next boot")
        else:
            await watch.end("dep_1", "/exit")
        await wait_until(lambda: not Path(f"/proc/{keeper}").exists(), 20)
        watch.start()
        assert await watch.ask("dep_1") == "release dep_1"

    watch.publish("dep_1")
    watch.start()
    await watch.ask("dep_1")
    for with_machine in (True, False):
        await end_without_watchdog(with_machine=with_machine)
        expected = [] if with_machine else [("shop", "exit", 3)]
        assert (watch.crashes, watch.state("dep_1").exits) == (expected, len(expected))


async def test_no_app_can_impersonate_another(watch: Watch) -> None:
    """All apps have the same port in their own networks, and cannot reach the sockets of others, or their own files."""
    watch.publish("dep_1")
    watch.publish("dep_2", app_id="other")
    watch.start()
    who = eval(await watch.ask("dep_1", "/who"))
    assert (who["cwd"], who["home"]) == ("/app", "/home/app")
    assert (who["uid"] in Watch.users) == (os.geteuid() == 0)
    assert await watch.ask("dep_1", "/write") == "kept"
    assert await watch.ask("dep_1", "/deface") == "EROFS"
    for deploy_id in ("dep_1", "dep_2"):
        assert await watch.ask(deploy_id) == f"release {deploy_id}"
        assert await watch.ask(deploy_id, "/neighbours") == '["app"]'
        assert await watch.ask(deploy_id, "/exists/app/server.js") == "true"
        assert await watch.ask(deploy_id, f"/exists{watch.hosting.folder}") == "false", "no path of the host is visible"
    sockets = [Path(watch.state(deploy_id).socket) for deploy_id in ("dep_1", "dep_2")]
    assert [path.stat().st_mode & 0o777 for path in sockets] == [0o600, 0o600]
    caddy_user = CADDY_USER if os.geteuid() == 0 else os.geteuid()
    assert {path.stat().st_uid for path in sockets} == {caddy_user}


async def test_output_is_bounded_and_the_latest_is_kept(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch.publish("dep_1", "seq 400000; sleep 1.2; exec node server.js")
    watch.start()
    await watch.ask("dep_1")
    path = output_path(watch.hosting.folder, "dep_1")
    await wait_until(lambda: path.read_text().endswith("starting\n"), 20)
    former = path.with_name(f"{path.name}{FORMER}")
    assert path.stat().st_size + (former.stat().st_size if former.exists() else 0) <= 1 << 20


async def test_secrets_reach_the_app_but_not_its_output_or_command_lines(watch: Watch, hosting: Hosting) -> None:
    secret = f"secret-{secrets.token_hex(8)}"
    watch.publish("dep_1", 'echo "it is $TOKEN"; exec node server.js')
    vault = Vault(base64.b64encode(os.urandom(32)).decode())
    sealed = vault.seal(msgspec.json.encode({"TOKEN": secret}).decode())
    write_environment(hosting.site(hosting.deploy("dep_1")).release("dep_1"), sealed)
    watch.vault = vault
    watch.start()
    await watch.ask("dep_1")
    await wait_until(lambda: read_output(hosting, "dep_1") == "it is ***\nstarting\n")
    assert not marked(secret)
