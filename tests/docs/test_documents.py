"""What the documents list is what the code has."""

import re
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from litestar import Router
from litestar.routes import HTTPRoute

from gateway import app as application
from gateway import errors
from gateway.inference.handler import METHODS
from gateway.settings import Settings, load
from gateway.store.client import __doc__
from gateway.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
FIELDS = {f"GATEWAY_{field.name.upper()}": field for field in msgspec.structs.fields(Settings)}
TYPES = {str(str): "text", str(bool): "switch", str(int): "whole number", str(float): "number"}


def text(path: str) -> str:
    return (ROOT / path).read_text()


def table(source: str, heading: str) -> dict[str, list[str]]:
    """The rows of the table whose first column has this heading, by the first cell without its backticks."""
    _, _, rest = source.partition(f"\n| {heading} |")
    rows = [line.strip("| ").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[2:]]
    # An empty cell leaves a bare bar behind.
    cells = [[part.strip() for cell in row for part in re.split(r"(?<!\S)\|(?!\S)", cell)] for row in rows]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_setting_is_in_the_readme() -> None:
    assert sorted(set(table(text("README.md"), "variable")) ^ set(FIELDS)) == []


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_has_the_type_and_default_it_says(name: str) -> None:
    kind, _, default, _ = table(text("README.md"), "variable")[name]
    field = FIELDS[name]
    assert kind == TYPES.get(str(field.type), "list")
    if default == "none":
        assert not getattr(Settings(), field.name)
    elif default == "the base URL":
        assert load({}).api_url == load({}).base_url
    else:
        assert getattr(load({name: default.strip("`")}), field.name) == getattr(load({}), field.name)


def test_compose_passes_every_setting_on() -> None:
    passed = re.findall(r"^    (GATEWAY_\w+):", text("compose.yaml"), re.MULTILINE)
    assert sorted(set(passed) ^ set(FIELDS)) == []


def test_the_example_of_an_env_file_names_settings() -> None:
    named = set(re.findall(r"^#?(GATEWAY_\w+)=", text(".env.example"), re.MULTILINE))
    assert named
    assert named <= set(FIELDS)


def test_every_key_is_in_the_keyspace() -> None:
    assert __doc__
    assert table(text("docs/keyspace.md"), "key") == table(__doc__, "key")


def test_every_route_is_in_the_readme() -> None:
    modules = [import_module(f"gateway.{path.stem}") for path in ROOT.glob("gateway/*.py")]
    handlers = [handler for module in modules for handler in getattr(module, "ROUTES", [])]
    handlers += [application.health, application.ready, application.metrics]
    there = {(method.decode(), f"/capsule/<app>/{path}") for path, method in METHODS.items()}
    for route in Router("/", route_handlers=handlers).routes:
        assert isinstance(route, HTTPRoute)
        path = re.sub(r"{(\w+_)?(\w+)}", r"<\2>", route.path_format)
        there |= {(method, path) for method in route.methods - {"OPTIONS"}}
    _, _, rest = text("README.md").partition("\n| method |")
    listed = re.findall(r"^\| (\w+) \| `(.+?)` \|", rest.partition("\n\n")[0], re.MULTILINE)
    assert sorted(set(listed) ^ there) == []


def test_every_metric_is_in_the_readme() -> None:
    there = {
        metric.name + ("_total" if metric.type == "counter" else ""): metric.type
        for metric in Metrics().registry.collect()
    }
    assert {name: row[0] for name, row in table(text("README.md"), "metric").items()} == there


def test_every_error_is_in_the_api() -> None:
    there = {(kind.code, str(kind.status)) for kind in subclasses(errors.ServiceError)}
    assert {(code, row[0]) for code, row in table(text("docs/api.md"), "code").items()} == there


def subclasses(kind: type[errors.ServiceError]) -> list[type[errors.ServiceError]]:
    return [kind, *(deeper for direct in kind.__subclasses__() for deeper in subclasses(direct))]


@pytest.mark.parametrize("source", [path.relative_to(ROOT) for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]])
def test_links_lead_somewhere(source: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text(str(source))):
        assert (ROOT / source.parent / target).exists(), target


def test_the_map_names_what_is_there() -> None:
    drawn = text("README.md").split("```\ngateway/ ")[1].split("```")[0]
    for name in re.findall(r"[\w-]+\.py", drawn):
        assert (ROOT / "gateway" / name).exists() or (ROOT / "workers" / name).exists(), name
