"""The pages list exactly the settings, routes, metrics, errors, alerts and files that the code has."""

import functools
import re
from pathlib import Path
from typing import get_args

import msgspec
from litestar import Router
from litestar.routes import HTTPRoute

from docs import generate
from gateway import app as application
from gateway import errors
from gateway.accounts.openid import Refusal
from gateway.api import documentation
from gateway.inference.handler import methods_of
from gateway.settings import Settings, load
from gateway.settings.prices import PRICES
from gateway.telemetry.metrics import Metrics
from tests.support.pages import find_rows, find_table, read_page

ROOT = Path(__file__).parents[2]
FIELDS = {f"GATEWAY_{field.name.upper()}": field for field in msgspec.structs.fields(Settings)}
TYPES = {str(str): "text", str(bool): "switch", str(int): "whole number", str(float): "number"}


def test_every_setting_is_listed() -> None:
    assert sorted(set(find_table(read_page("docs/settings.md"), "variable")) ^ set(FIELDS)) == []


def test_a_setting_has_the_type_unit_and_default_it_says() -> None:
    defaults = load({})
    for name, (kind, unit, default, _) in find_table(read_page("docs/settings.md"), "variable").items():
        field = FIELDS[name]
        assert kind == TYPES.get(str(field.type), "list"), name
        assert unit or kind in ("text", "switch"), f"{name}: a number without a unit"
        if default == "none":
            assert not getattr(Settings(), field.name), name
        elif default == "the base URL":
            assert defaults.api_url == defaults.base_url
        else:
            assert getattr(load({name: default.strip("`")}), field.name) == getattr(defaults, field.name), name


def test_compose_passes_every_setting_on() -> None:
    passed = re.findall(r"^    (GATEWAY_\w+):", read_page("compose.yaml"), re.MULTILINE)
    assert sorted(set(passed) ^ set(FIELDS)) == ["GATEWAY_TRUST_BUILDS"], "whose name says why"


def test_the_example_of_an_env_file_names_settings() -> None:
    named = set(re.findall(r"^#?(GATEWAY_\w+)=", read_page(".env.example"), re.MULTILINE))
    assert named
    assert named <= set(FIELDS)


def test_the_generated_pages_are_up_to_date() -> None:
    assert len(re.findall(r"^\| `", read_page("docs/keyspace.md"), re.MULTILINE)) > 90
    for name, write in generate.PAGES.items():
        assert read_page(name) == write(), f"{name}: run python -m docs.generate"


def test_every_route_is_listed() -> None:
    handlers = [each for each in application.ROUTES if each not in documentation.ROUTES]
    methods = methods_of(PRICES)
    paths = {path: re.sub("models/.+", "models/<model>", path) for path in methods}
    present = {(method.decode(), f"/capsule/<app>/{paths[path]}") for path, method in methods.items()}
    for route in Router("/", route_handlers=handlers).routes:
        assert isinstance(route, HTTPRoute)
        path = re.sub(r"{(\w+_)?(\w+)}", r"<\2>", route.path_format)
        present |= {(method, path) for method in route.methods - {"OPTIONS", "HEAD"}}
    listed = [(method, path.strip("`")) for method, path, *_ in find_rows(read_page("docs/api.md"), "method")]
    assert sorted(listed) == sorted(present)


def test_every_metric_and_its_labels_are_listed() -> None:
    metrics = Metrics()
    labels = {metric._name: list(metric._labelnames) for metric in vars(metrics).values() if hasattr(metric, "_name")}
    present = {
        metric.name + ("_total" if metric.type == "counter" else ""): (metric.type, labels[metric.name])
        for metric in metrics.registry.collect()
    }
    listed = find_table(read_page("docs/metrics.md"), "metric")
    assert {name: (row[0], re.findall(r"`(\w+)`", row[1])) for name, row in listed.items()} == present


def test_every_alert_is_explained() -> None:
    present = re.findall(r"- alert: (\w+)", read_page("ops/alerts.yml"))
    assert list(find_table(read_page("docs/monitoring.md"), "alert")) == present


def test_listed_log_events_are_logged() -> None:
    code = "".join(path.read_text() for folder in ("gateway", "workers") for path in (ROOT / folder).rglob("*.py"))
    for event in find_table(read_page("docs/monitoring.md"), "log event"):
        assert f'"{event}"' in code, event


def test_every_reason_of_a_refused_sign_in_is_listed() -> None:
    assert list(find_table(read_page("docs/monitoring.md"), "refusal")) == list(get_args(Refusal))


def test_every_attribute_of_a_trace_is_listed() -> None:
    sources = ("telemetry/spans.py", "inference/traces.py", "inference/provider/pool.py")
    workers = ("workers/webhooks/sender.py", "workers/builds/builder.py")
    code = "".join(map(read_page, (*(f"gateway/{path}" for path in sources), *workers)))
    present = set(re.findall(r'"((?:capsule|gen_ai|http|server|error)\.[\w.]+)"', code))
    assert set(find_table(read_page("docs/traces.md"), "attribute")) == present


def test_compose_passes_variables_of_traces_on_that_are_listed() -> None:
    passed = set(re.findall(r"^    (OTEL_\w+):", read_page("compose.yaml"), re.MULTILINE))
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in passed
    assert passed <= set(find_table(read_page("docs/traces.md"), "variable"))


def test_every_error_is_in_the_api() -> None:
    present = {
        (kind.code, str(kind.status)) for kind in (errors.ServiceError, *generate.subclasses(errors.ServiceError))
    }
    assert {(code, row[0]) for code, row in find_table(read_page("docs/api.md"), "code").items()} == present


PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
PAGES += ["bench/README.md", "capsule/README.md", "ops/kubernetes/README.md"]
PAGES += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/*.md"))]


def test_links_lead_somewhere() -> None:
    for source in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", read_page(source)):
            page = (ROOT / source).parent / target if target else ROOT / source
            assert page.exists(), (source, target)
            if anchor:
                assert anchor in anchors(page), (source, f"{target}#{anchor}")


def test_the_index_lists_every_page() -> None:
    links = set(re.findall(r"\]\(([^)#]+)", read_page("docs/README.md")))
    listed = {(ROOT / "docs" / link).resolve().relative_to(ROOT).as_posix() for link in links}
    assert sorted(set(PAGES) - listed - {"docs/README.md"}) == []


@functools.cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


SOURCES = [
    path.relative_to(ROOT)
    for folder in ("capsule_gateway", "gateway", "workers", "lua", "bench", "tests")
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in (".py", ".lua")
]
ELSEWHERE = {"receiver.py", "examples/receiver.py", "locustfile.py", "examples/locustfile.py"}  # in docs/
# That people deploy.
OF_PROJECTS = {"manage.py", "main.py", "settings.py", "app/main.py", "config.py", "app.py", "wsgi.py"}


def test_the_documents_name_files_that_exist() -> None:
    for source in PAGES:
        folders = {path.parts[0] for path in SOURCES} - {"tests"}
        if source == "bench/README.md":
            folders = {"bench"}
        elif source in ("CONTRIBUTING.md", "docs/security.md", "docs/chaos.md"):
            folders |= {"tests"}
        known = {
            "/".join(path.parts[n:]) for path in SOURCES if path.parts[0] in folders for n in range(len(path.parts))
        }
        for name in re.findall(r"[\w/-]+\.(?:py|lua)\b", read_page(source)):
            assert name in known | ELSEWHERE | OF_PROJECTS, (source, name)


def test_the_list_of_folders_is_true() -> None:
    """Check that every folder with code has a line, and every line a folder."""
    drawn = read_page("CONTRIBUTING.md").split("## Where things live")[1].split("```\n")[1].split("```")[0]
    top, lines = Path(), set()
    for line in drawn.splitlines():
        if opened := re.match(r"(  )?([\w/-]+)/ ", line):
            top = top if opened[1] else Path(opened[2])
            folder = top / opened[2] if opened[1] else top
            assert (ROOT / folder).is_dir(), folder
            lines.add(folder)
    packages = {
        path.parent.relative_to(ROOT)
        for name in ("capsule_gateway", "gateway", "workers")
        for path in ROOT.glob(f"{name}/**/*.py")
    }
    assert sorted(packages - lines) == []
