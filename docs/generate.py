"""Generates parts of the documentation from the code: `python -m docs.generate`.

Writes the table of 429s in architecture.md from the errors and allowances, the table of scopes in api.md, the events in
webhooks.md from their classes, the tables of keyspace.md from the module that builds the keys, modules.md from the
first line of each module, and the JSON schema of capsule.toml.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import msgspec

from gateway import keys
from gateway.accounts.access import CALLS, ROLES, SCOPES, Call, Where, split
from gateway.deploys.manifest import manifest_schema
from gateway.errors import ServiceError
from gateway.events.catalog import SAMPLES

DOCS = Path(__file__).parent
ROOT = DOCS.parent
MODULES = """# Modules

This page lists every module of the service with the first line of its docstring. `python -m docs.generate` writes it,
and a test checks that it is up to date. [architecture.md](architecture.md) explains how the modules work together.
"""
RULE = """# The alerts of ops/alerts.yml. `python -m docs.generate` writes this file.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: capsule
  labels: { app.kubernetes.io/part-of: capsule }
spec:
  groups:
"""


def fill(page: str, part: str, text: str) -> str:
    """Returns the page in docs/ with this text as its part, which two comments enclose."""
    enclosed = re.compile(rf"(<!-- {part} -->\n).*(<!-- end of {part} -->\n)", re.DOTALL)
    return enclosed.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", (DOCS / page).read_text())


def keyspace() -> str:
    tables = []
    for title, table in keys.TABLES.items():
        head = f"## {title}\n\n| key | type | holds | expires |\n| --- | --- | --- | --- |"
        rows = [f"| `{each.name}` | {each.holds.replace(': ', ' | ', 1)} | {each.ends} |" for each in table]
        tables.append("\n".join([head, *rows]))
    return fill("keyspace.md", "tables", "\n\n".join(tables))


def api() -> str:
    heads = ["call", *SCOPES, "with `app`", "developer", "viewer", "agents and command line"]
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *(access_row(*each) for each in CALLS.items())]
    return fill("api.md", "access", "\n".join(rows))


def access_row(address: str, call: Call) -> str:
    method, path = address.split()
    confinable = call.where is not Where.ACCOUNT and call.right.scopes != {"full"}
    marks = ["✓" if scope in call.right.scopes else "" for scope in SCOPES]
    marks.append("✓" if confinable else "")
    marks += ["✓" if role in call.right.roles else "" for role in ROLES if role != "owner"]
    also = [f"`{tool}`" for tool in split(call.tools)] + [f"`capsule {name}`" for name in split(call.commands)]
    target = re.sub(r"{(?:\w+_)?(\w+)}", r"<\1>", path)
    return f"| `{method} {target}` | {' | '.join(marks)} | {', '.join(also)} |"


def webhooks() -> str:
    rows = [f"| `{name}` | {', '.join(fields(type(sample)))} |" for name, sample in SAMPLES.items()]
    table = "\n".join(["| event | data besides `appId` and `appName` |", "| --- | --- |", *rows])
    texts = [f"**`{name}`**: {inspect.getdoc(type(sample))}" for name, sample in SAMPLES.items()]
    return fill("webhooks.md", "events", "\n\n".join([table, "## When events are sent", *texts]))


def fields(event: type[msgspec.Struct]) -> Iterator[str]:
    """Yield each field of the event's data, with its choices or the fields of its items."""
    for field in msgspec.structs.fields(event):
        if field.name == "sample":  # of test events
            continue
        kinds = [kind for kind in get_args(field.type) or [field.type] if kind is not msgspec.UnsetType]
        optional = "?" if field.default is msgspec.UNSET else ""
        more = ""
        if get_origin(field.type) is Literal and len(kinds) > 1:
            more = f" ({', '.join(f'`{kind}`' for kind in kinds)})"
        elif get_origin(field.type) is list:
            more = f": {', '.join(fields(kinds[0]))}"
        yield f"`{field.name}{optional}`{more}"


def architecture() -> str:
    table = "\n".join(["| code | what is counted | file |", "| --- | --- | --- |", *sorted(set(limits()))])
    return fill("architecture.md", "limits", table)


def limits() -> Iterator[str]:
    """Yield a row for each allowance, and for each other module that answers 429."""
    kinds = {kind.__name__: kind for kind in subclasses(ServiceError) if kind.status == 429}
    named = re.compile("|".join(["Allowance", *kinds]))
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if named.search(text) else ():
            match node:
                case ast.Call(func=ast.Name(id="Allowance"), args=[_, *values]):
                    limit, seconds, *words = map(ast.literal_eval, values)
                    errors = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "error"]
                    kind = kinds[errors[0] if errors else "RateLimited"]
                    counted = (
                        f"{words[0].format(limit=limit)}."
                        if words
                        else f"{describe_kind(kind)[:-1]}: {limit} in {seconds} s."
                    )
                case ast.Call(func=ast.Name(id=name)) | ast.Raise(exc=ast.Name(id=name)) if name in kinds:
                    kind, counted = kinds[name], describe_kind(kinds[name])
                case _:
                    continue
            yield f"| `{kind.code}` | {counted} | `{path.relative_to(ROOT)}` |"


def subclasses(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from subclasses(sub)


def describe_kind(kind: type[ServiceError]) -> str:
    return (kind.__doc__ or "").splitlines()[0]


def modules() -> str:
    return "\n".join([MODULES, *sections()])


def sections() -> Iterator[str]:
    """Yield a section for each folder, with a table of its modules."""
    folders = {path.parent for top in ("capsule_gateway", "gateway", "workers") for path in (ROOT / top).rglob("*.py")}
    for folder in sorted(folders):
        first = {path.name: path.read_text().partition("\n")[0] for path in sorted(folder.glob("*.py"))}
        described = {
            name: line.strip('"').replace("|", "\\|") for name, line in first.items() if line.startswith('"""')
        }
        lines = [f"| `{name}` | {text} |" for name, text in described.items()]
        if lines:
            yield "\n".join([f"## {folder.relative_to(ROOT)}/\n", "| module | |", "| --- | --- |", *lines, ""])


def schema() -> str:
    return json.dumps(manifest_schema(), indent=2) + "\n"


def prometheus_rule() -> str:
    """Return the alerts as the resource that the Prometheus operator reads."""
    groups = (ROOT / "ops/alerts.yml").read_text().partition("groups:\n")[2]
    body = "".join(f"  {line}" if line.strip() else line for line in groups.splitlines(keepends=True))
    return f"{RULE}{body}"


PAGES = {
    "ops/kubernetes/monitoring/prometheus-rule.yaml": prometheus_rule,
    "docs/capsule.schema.json": schema,
    "docs/api.md": api,
    "docs/keyspace.md": keyspace,
    "docs/architecture.md": architecture,
    "docs/modules.md": modules,
    "docs/webhooks.md": webhooks,
}

if __name__ == "__main__":
    for name, write in PAGES.items():
        (ROOT / name).write_text(write())
