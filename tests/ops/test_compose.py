"""compose.yaml, the Dockerfile, and the script that builds the images without Docker."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support.dockerfile import DOCKERFILE, read_stages

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ops/build-images"
COMPOSE = (ROOT / "compose.yaml").read_text()


def read_services() -> dict[str, str]:
    """Returns the text of each service in compose.yaml by its name."""
    text = COMPOSE.split("\nservices:\n")[1].split("\nnetworks:\n")[0]
    parts = re.split(r"^  (\w+):\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def read_networks(service: str) -> set[str]:
    [found] = re.findall(r"^    networks: \[(.*)\]$", read_services()[service], re.MULTILINE)
    return set(found.split(", "))


def test_valkey_has_a_password_that_is_in_no_command_line() -> None:
    valkey = read_services()["valkey"]
    assert "printf 'requirepass %s\\n' \"$$VALKEY_PASSWORD\" | valkey-server -" in valkey
    assert re.search(r"GATEWAY_REDIS_URL: redis://:\$\{VALKEY_PASSWORD:\?[^}]+\}@valkey:6379/0", COMPOSE)
    assert "VALKEY_PASSWORD=\n" in (ROOT / ".env.example").read_text()


def test_the_deploy_worker_shares_a_network_only_with_valkey() -> None:
    shared = {name: read_networks("deploys") & read_networks(name) for name in read_services() if name != "deploys"}
    assert {name: found for name, found in shared.items() if found} == {"valkey": {"builds"}}


def test_the_builder_image_has_bubblewrap() -> None:
    assert " bubblewrap " in read_stages()["builder"]
    assert " bubblewrap\n" in (ROOT / ".ci/run").read_text()


def test_the_gateway_image_installs_no_programs() -> None:
    stages = read_stages()
    assert [*stages][-1] == "gateway"
    assert "apt-get" not in stages["service"] + stages["gateway"]
    assert "target: builder" in read_services()["deploys"]


def test_each_image_has_a_user_and_a_health_check() -> None:
    for name in ("gateway", "builder"):
        stage = read_stages()[name]
        assert "\nUSER 10001:10001\n" in stage
        assert re.search(r'^HEALTHCHECK .* CMD \["capsule", .*"--check"', stage, re.MULTILINE)


def test_a_backup_every_day(redis_url: str, tmp_path: Path) -> None:
    """Its command makes one at once, and then waits for a day. It is off unless its profile is switched on."""
    service = yaml.safe_load(COMPOSE)["services"]["backup"]
    assert service["profiles"] == ["backup"]
    assert any(volume.endswith(":/var/backups/capsule") for volume in service["volumes"])
    shell, option, script = service["command"]
    assert "${CAPSULE_BACKUP_TARGET:-/var/backups/capsule}" in script
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CAPSULE_BACKUP_TARGET": str(tmp_path / "target"),
        "GATEWAY_REDIS_URL": redis_url,
        "GATEWAY_DATA_DIR": str(tmp_path / "data"),
    }
    command = [shell, option, script]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline().startswith("Backed up 0 accounts and 0 apps as of ")
            assert run.poll() is None
        finally:
            os.killpg(run.pid, signal.SIGKILL)
    assert len([*(tmp_path / "target" / "backups").iterdir()]) == 1


def test_every_file_that_compose_mounts_exists() -> None:
    mounted = re.findall(r"^\s+- \./(\S+?):", COMPOSE, re.MULTILINE)
    assert "ops/alerts.yml" in mounted
    for path in mounted:
        assert (ROOT / path).exists(), path


def test_script_names_the_bases_and_targets_of_the_dockerfile() -> None:
    script, dockerfile = SCRIPT.read_text(), DOCKERFILE.read_text()
    bases = set(re.findall(r"--build-arg (\w+)=", script))
    assert bases == set(re.findall(r"^ARG (\w+)=", dockerfile, re.MULTILINE)) == {"BASE", "BUILD_BASE"}
    targets = set(re.findall(r"^build (\w+)$", script, re.MULTILINE))
    assert targets == {"gateway", "builder"} <= {*read_stages()}


def test_no_image_has_pip_and_its_configuration() -> None:
    bases = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert [stage for base, stage in bases if base == "${BUILD_BASE}"] == ["build"]
    assert "pip install" not in "".join(text for stage, text in read_stages().items() if stage != "build")
