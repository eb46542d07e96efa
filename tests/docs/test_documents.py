"""What the documents list is what the code has."""

import re
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from litestar import Router
from litestar.routes import HTTPRoute
from prometheus_client.metrics import MetricWrapperBase

from docs import generate
from gateway import app as application
from gateway import errors
from gateway.inference.handler import METHODS
from gateway.settings import Settings, load
from gateway.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
FIELDS = {f"GATEWAY_{field.name.upper()}": field for field in msgspec.structs.fields(Settings)}
TYPES = {str(str): "text", str(bool): "switch", str(int): "whole number", str(float): "number"}


def text(path: str) -> str:
    return (ROOT / path).read_text()


def rows(source: str, heading: str) -> list[list[str]]:
    """The rows of all tables whose first column has this heading."""
    found = []
    for rest in source.split(f"\n| {heading} |")[1:]:
        lines = [line.strip("| ").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[2:]]
        # An empty cell leaves a bare bar behind.
        found += [[part.strip() for cell in line for part in re.split(r"(?<!\S)\|(?!\S)", cell)] for line in lines]
    return found


def table(source: str, heading: str) -> dict[str, list[str]]:
    """The same rows by their first cell, without its backticks. No two may have the same."""
    found = rows(source, heading)
    named = {row[0].strip("`"): row[1:] for row in found}
    assert len(named) == len(found), f"a {heading} is listed twice"
    return named


def test_every_setting_is_listed() -> None:
    assert sorted(set(table(text("docs/settings.md"), "variable")) ^ set(FIELDS)) == []


def test_the_readme_names_every_setting_and_links_to_the_list() -> None:
    topics = [name for row in rows(text("README.md"), "topic") for name in re.findall(r"`(\w+)`", row[1])]
    assert sorted(topics) == sorted(FIELDS)
    assert "(docs/settings.md)" in text("README.md")


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_has_the_type_unit_and_default_it_says(name: str) -> None:
    kind, unit, default, _ = table(text("docs/settings.md"), "variable")[name]
    field = FIELDS[name]
    assert kind == TYPES.get(str(field.type), "list")
    assert unit or kind in ("text", "switch"), "a number without a unit"
    if default == "none":
        assert not getattr(Settings(), field.name)
    elif default == "the base URL":
        assert load({}).api_url == load({}).base_url
    else:
        assert getattr(load({name: default.strip("`")}), field.name) == getattr(load({}), field.name)


def test_compose_passes_every_setting_on() -> None:
    passed = re.findall(r"^    (GATEWAY_\w+):", text("compose.yaml"), re.MULTILINE)
    assert sorted(set(passed) ^ set(FIELDS)) == ["GATEWAY_TRUST_BUILDS"], "whose name says why"


def test_the_example_of_an_env_file_names_settings() -> None:
    named = set(re.findall(r"^#?(GATEWAY_\w+)=", text(".env.example"), re.MULTILINE))
    assert named
    assert named <= set(FIELDS)


def test_the_generated_pages_are_up_to_date() -> None:
    page = text("docs/keyspace.md")
    assert len(re.findall(r"^\| `", page, re.MULTILINE)) > 90
    assert (page, text("docs/modules.md")) == (generate.keyspace(), generate.modules()), "run python -m docs.generate"


def test_every_route_is_listed() -> None:
    files = [path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("gateway/*/*.py")]
    modules = [
        import_module(".".join(path.parts))
        for path in files
        if path.stem in ("pages", "routes") or "_routes" in path.stem
    ]
    handlers = [handler for module in modules for handler in getattr(module, "ROUTES", [])]
    handlers += [application.health, application.ready, application.metrics]
    paths = {path: re.sub("models/.+", "models/<model>", path) for path in METHODS}
    there = {(method.decode(), f"/capsule/<app>/{paths[path]}") for path, method in METHODS.items()}
    for route in Router("/", route_handlers=handlers).routes:
        assert isinstance(route, HTTPRoute)
        path = re.sub(r"{(\w+_)?(\w+)}", r"<\2>", route.path_format)
        there |= {(method, path) for method in route.methods - {"OPTIONS"}}
    listed = [(method, path.strip("`")) for method, path, *_ in rows(text("docs/api.md"), "method")]
    assert sorted(listed) == sorted(there)


def test_every_metric_is_listed() -> None:
    there = {
        metric.name + ("_total" if metric.type == "counter" else ""): metric.type
        for metric in Metrics().registry.collect()
    }
    assert {name: row[0] for name, row in table(text("docs/metrics.md"), "metric").items()} == there


def test_every_label_of_a_metric_is_listed() -> None:
    there = {}
    for metric in vars(Metrics()).values():
        if isinstance(metric, MetricWrapperBase):
            (described,) = metric.describe()
            name = described.name + ("_total" if described.type == "counter" else "")
            there[name] = list(metric._labelnames)
    listed = table(text("docs/metrics.md"), "metric")
    assert {name: re.findall(r"`(\w+)`", row[1]) for name, row in listed.items()} == there


def test_every_alert_is_in_the_operations() -> None:
    there = re.findall(r"- alert: (\w+)", text("ops/alerts.yml"))
    assert list(table(text("docs/operations.md"), "alert")) == there


def test_log_events_of_the_operations_are_logged() -> None:
    code = "".join(path.read_text() for folder in ("gateway", "workers") for path in (ROOT / folder).rglob("*.py"))
    for event in table(text("docs/operations.md"), "log event"):
        assert f'"{event}"' in code, event


def test_every_attribute_of_a_trace_is_listed() -> None:
    sources = ("gateway/telemetry/spans.py", "gateway/inference/traces.py")
    code = "".join(text(path) for path in (*sources, "workers/webhooks/sender.py", "workers/builds/builder.py"))
    there = set(re.findall(r'"((?:capsule|gen_ai|http|server|error)\.[\w.]+)"', code))
    assert set(table(text("docs/traces.md"), "attribute")) == there


def test_compose_passes_variables_of_traces_on_that_are_listed() -> None:
    passed = set(re.findall(r"^    (OTEL_\w+):", text("compose.yaml"), re.MULTILINE))
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in passed
    assert passed <= set(table(text("docs/traces.md"), "variable"))


def test_every_error_is_in_the_api() -> None:
    there = {(kind.code, str(kind.status)) for kind in subclasses(errors.ServiceError)}
    assert {(code, row[0]) for code, row in table(text("docs/api.md"), "code").items()} == there


def subclasses(kind: type[errors.ServiceError]) -> list[type[errors.ServiceError]]:
    return [kind, *(deeper for direct in kind.__subclasses__() for deeper in subclasses(direct))]


PAGES = ["README.md", "CHANGELOG.md", "bench/README.md", "capsule/README.md", "ops/kubernetes/README.md"]
PAGES += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("source", PAGES)
def test_links_lead_somewhere(source: str) -> None:
    folder = (ROOT / source).parent
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text(source)):
        page = folder / target if target else ROOT / source
        assert page.exists(), target
        if anchor:
            assert anchor in anchors(page.read_text()), f"{target}#{anchor}"


def anchors(source: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", source, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


SOURCES = [
    path.relative_to(ROOT) for folder in ("gateway", "workers", "lua", "bench") for path in (ROOT / folder).rglob("*.*")
]
ELSEWHERE = {"receiver.py", "examples/receiver.py", "locustfile.py", "examples/locustfile.py"}  # in docs/


@pytest.mark.parametrize("source", PAGES)
def test_the_documents_name_files_that_exist(source: str) -> None:
    if source == "bench/README.md":
        known = [path.relative_to(ROOT) for path in (ROOT / "bench").glob("*.*")]
    elif source in ("docs/security.md", "docs/chaos.md"):
        known = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")]
    else:
        known = SOURCES
    for name in re.findall(r"[\w/-]+\.(?:py|lua)\b", text(source)):
        assert any(path.match(name) for path in known) or name in ELSEWHERE, name


def test_the_map_is_true() -> None:
    """Every folder with code has a line, and every line a folder."""
    drawn = text("docs/architecture.md").split("### Folders")[1].split("```\n")[1].split("```")[0]
    top, lines = Path(), set()
    for line in drawn.splitlines():
        if opened := re.match(r"(  )?([\w/-]+)/ ", line):
            top = top if opened[1] else Path(opened[2])
            folder = top / opened[2] if opened[1] else top
            assert (ROOT / folder).is_dir(), folder
            lines.add(folder)
    packages = {
        path.parent.relative_to(ROOT) for name in ("gateway", "workers") for path in ROOT.glob(f"{name}/**/*.py")
    }
    assert sorted(packages - lines) == []
