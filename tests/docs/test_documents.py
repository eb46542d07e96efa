"""The pages list exactly the settings, routes, metrics, errors and alerts that the code has, and measured figures."""

import functools
import re
import runpy
import subprocess
import sys
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


MODEL = runpy.run_path(str(ROOT / "bench/capacity.py"))
README = (ROOT / "bench/README.md").read_text()
FIGURES = README.partition("Redis Cluster, three primaries")[0]


def test_the_page_on_scaling_has_what_the_script_prints() -> None:
    document = read_page("docs/scaling.md")
    done = subprocess.run([sys.executable, ROOT / "bench/capacity.py"], capture_output=True, text=True, check=True)
    parts = done.stdout.strip().split("\n\n")
    assert len(parts) == 3
    assert [part for part in parts if f"\n{part}\n" not in document] == []


def measured(row: str) -> float:
    (value,) = re.findall(rf"^\| {re.escape(row)} \|.*?\*\*([\d.,]+) \(", FIGURES, re.M)
    return float(value.replace(",", ""))


def test_the_constants_are_the_measured_ones() -> None:
    assert measured("C") == MODEL["REQUEST_US"]
    assert measured("C-cold") - measured("C") == MODEL["NEW_USER_US"]
    assert measured("B500") == MODEL["TOKEN_US"]
    assert measured("mem") == MODEL["STREAM_KIB"]
    assert f"| deliveries per CPU second, 64 accounts | {MODEL['DELIVERIES']:,} |" in README
    assert f"| request, of Redis | {MODEL['REDIS_US']} |" in README
    assert f"| second of an open stream, also while nothing arrives | {MODEL['STREAM_US']} |" in README
