"""What keeps the parts of an installation apart. `services` gives the text of each service in compose.yaml."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "compose.yaml").read_text()


def services() -> dict[str, str]:
    text = COMPOSE.split("\nservices:\n")[1].split("\nnetworks:\n")[0]
    parts = re.split(r"^  (\w+):\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def networks(service: str) -> set[str]:
    [found] = re.findall(r"^    networks: \[(.*)\]$", services()[service], re.MULTILINE)
    return set(found.split(", "))


def test_valkey_asks_for_a_password_that_is_in_no_command_line() -> None:
    valkey = services()["valkey"]
    assert "printf 'requirepass %s\\n' \"$$VALKEY_PASSWORD\" | valkey-server -" in valkey
    assert re.search(r"GATEWAY_REDIS_URL: redis://:\$\{VALKEY_PASSWORD:\?[^}]+\}@valkey:6379/0", COMPOSE)
    assert "VALKEY_PASSWORD=\n" in (ROOT / ".env.example").read_text()


def test_the_deploy_worker_shares_a_network_with_valkey_alone() -> None:
    shared = {name: networks("deploys") & networks(name) for name in services() if name != "deploys"}
    assert {name: found for name, found in shared.items() if found} == {"valkey": {"builds"}}


def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile."""
    parts = re.split(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_image_of_the_builder_has_what_confines_builds() -> None:
    assert " bubblewrap " in stages()["builder"]
    assert " bubblewrap\n" in (ROOT / ".ci/run").read_text()


def test_the_image_of_the_gateway_installs_no_programs() -> None:
    assert [*stages()][-1] == "gateway"
    assert "apt-get" not in stages()["service"] + stages()["gateway"]
    assert "target: builder" in services()["deploys"]


def test_each_image_has_a_user_and_a_health_check() -> None:
    for name in ("gateway", "builder"):
        assert "\nUSER 10001:10001\n" in stages()[name]
        assert re.search(r'^HEALTHCHECK .* CMD \["capsule", .*"--check"', stages()[name], re.MULTILINE)
