"""Measures apps that sleep: what a thousand of them cost their worker, and how long one takes to answer.

Starts the worker `sites` with start commands of Node servers, or of `--app`, the folder of an app with a start command
in `--start`. Needs root, or control groups. The exit code is 1 if an answer was wrong, but never because of a
measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))

from rig import cpu_seconds, free_port, list_processes, open_folder, redis_server, resident_mib

from gateway.accounts.records import Account, App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.keys import account_key
from gateway.redis.client import Store
from workers.hosting import caddy
from workers.hosting.releases import Releases
from workers.hosting.watchdog import AppState, is_running, read_state, state_path

APPS = 1_000
SETTLE_SECONDS, SECONDS = 15.0, 30.0
WOKEN = 20
SLEEP_SECONDS = 3.0
DOMAIN, ACCOUNT = "apps.test", "acc_1"
KEY = "bench-encryption-key-of-no-value-0123456789"
SERVER = (
    """require('http').createServer((_, response) => response.end('hello')).listen(process.env.PORT, '127.0.0.1')"""
)


def make_apps(releases: Releases, number: int, app: Path | None, start: str) -> None:
    for name in (f"app-{each}" for each in range(number)):
        site = releases.site(ACCOUNT, name)
        release = site.release(f"dep_{name}")
        if app is None:
            (release / "app").mkdir(parents=True)
            (release / "app" / "server.js").write_text(SERVER)
        else:
            release.mkdir(mode=0o755)
            subprocess.run(["cp", "-al", "--", app, release / "app"], check=True)
        (release / "start").write_text(start)
        site.swap(release.name)
        releases.serve_as(f"{name}.{DOMAIN}", site)
        releases.run(release)
        asleep = AppState(str(releases.running / f"{release.name}.sock"), asleep=True)
        state_path(releases.folder, release.name).write_bytes(msgspec.json.encode(asleep))


async def register_apps(redis_url: str, number: int) -> None:
    store = Store(redis_url)
    registry = Registry(store, Vault(KEY))
    account = Account(id=ACCOUNT, name="Bench", plan="free", createdAt="")
    await store.client.set(account_key(account.id), msgspec.json.encode(account))
    for name in (f"app-{each}" for each in range(number)):
        await registry.put_app(App(id=name, name=name, account=account.id, createdAt=""), None)
    await store.close()


async def until_asleep(folder: Path, deploy_id: str) -> AppState:
    while not (state := read_state(folder, deploy_id)).asleep:
        await asyncio.sleep(0.2)
    return state


async def ask(client: aiohttp.ClientSession, url: str, name: str) -> float:
    """Returns the seconds until the answer."""
    asked = time.monotonic()
    async with client.get(url, headers={"Host": f"{name}.{DOMAIN}"}) as answer:
        assert answer.status == 200, answer.status
        await answer.read()
    return time.monotonic() - asked


async def measure(folder: Path, worker: int, number: int) -> None:
    while not caddy.read_address(folder):
        await asyncio.sleep(0.1)
    url = caddy.read_address(folder)
    names = [f"app-{each}" for each in range(number)]
    await asyncio.sleep(SETTLE_SECONDS)
    began = cpu_seconds(worker)
    await asyncio.sleep(SECONDS)
    used = (cpu_seconds(worker) - began) / SECONDS
    print(f"{number:,} apps asleep: the worker has {resident_mib(worker):.0f} MiB and uses {used:.1%} of a core")
    if names:
        await measure_answers(folder, url, names[:WOKEN])


async def measure_answers(folder: Path, url: str, names: list[str]) -> None:
    last = names[-1]
    async with aiohttp.ClientSession() as client:
        delays = [await ask(client, url, name) for name in names]
        print(f"first answer of an app that sleeps: median {median(delays):.2f} s, longest {max(delays):.2f} s")
        print(f"memory of an app that is awake: {proportional_mib(read_state(folder, f'dep_{last}').keeper):.0f} MiB")
        for state in ("is awake", "sleeps"):
            together = await asyncio.gather(*(ask(client, url, last) for _ in range(50)))
            print(f"50 requests at once to one that {state}: the last answer after {max(together):.2f} s")
            asked = time.monotonic()
            await until_asleep(folder, f"dep_{last}")
        print(f"asleep {time.monotonic() - asked:.1f} s after the last answer; the limit is {SLEEP_SECONDS:g} s")


def proportional_mib(pid: int) -> float:
    """Returns the memory of a process and its children. Each process that shares a page counts its share of it."""
    texts = [Path(f"/proc/{each}/smaps_rollup").read_text() for each in list_processes(pid)]
    return sum(int(text.partition("\nPss:")[2].split()[0]) for text in texts) / 1_024


async def stop_apps(folder: Path, releases: Releases) -> None:
    keepers = []
    for link in list(releases.running.iterdir()):
        if link.is_symlink():
            keepers.append(read_state(folder, link.name))
            link.unlink()
    while any(is_running(state.keeper, state.began) for state in keepers):
        await asyncio.sleep(0.2)
    await caddy.stop(folder)


async def run(folder: Path, number: int, app: Path | None, start: str) -> None:
    releases = Releases(folder)
    releases.create_folders()
    make_apps(releases, number, app, start)
    with redis_server() as port, (folder / "log").open("ab") as log:
        redis_url = f"redis://127.0.0.1:{port}/0"
        environment = {
            "PATH": os.environ["PATH"],
            "GATEWAY_REDIS_URL": redis_url,
            "GATEWAY_ENCRYPTION_KEY": KEY,
            "GATEWAY_DATA_DIR": str(folder),
            "GATEWAY_APPS_DOMAIN": DOMAIN,
            "GATEWAY_APPS_LISTEN": f"127.0.0.1:{free_port()}",
            "GATEWAY_APP_SLEEP": f"free={SLEEP_SECONDS:g}",
        }
        await register_apps(redis_url, number)
        worker = subprocess.Popen([sys.executable, "-m", "workers", "sites"], env=environment, stdout=log, stderr=log)
        try:
            await measure(releases.folder, worker.pid, number)
        finally:
            await stop_apps(releases.folder, releases)
            worker.terminate()
            worker.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--apps", type=int, default=APPS)
    parser.add_argument("--app", type=Path, help="the folder of an app, in place of a Node server of one line")
    parser.add_argument("--start", default="exec node server.js", help="its start command")
    options = parser.parse_args()
    asyncio.run(run(open_folder("sleep"), options.apps, options.app, options.start))
    return 0


if __name__ == "__main__":
    sys.exit(main())
