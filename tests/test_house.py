"""The rules of the repository: which module may import which, sizes, the place of tests and of Redis keys, and names.

Imports count wherever they are, even inside functions and for types only.
"""

import ast
import functools
import graphlib
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway import keys
from gateway.operations.sealed import SEALED
from tests.support.key_leaks import pattern

ROOT = Path(__file__).parents[1]
OURS = ("capsule_gateway", "gateway", "workers", "tests", "bench", "docs")
OTLP = Path("gateway/telemetry/otlp.py")
LOCUSTFILE = Path("docs/examples/locustfile.py")  # runs in the reader's environment, which has Locust
CLIENT_PROGRAMS = Path("tests/gateway/clients/programs")  # whose packages `check_clients.py` installs


def python_files(folder: str) -> list[Path]:
    found = (path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py")))
    return [
        path for path in found if not {"node_modules", "fixtures"} & {*path.parts}
    ]  # installed, or of example projects


def service_files(*without: str) -> list[Path]:
    return [path for folder in ("gateway", "workers") for path in python_files(folder) if str(path) not in without]


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


@functools.cache
def modules(folder: str) -> dict[str, Path]:
    """Returns the modules by name, such as `gateway.keys`. A package has the name of its folder."""
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in python_files(folder)}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(tree(path))]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements of a module, and those inside of them. Most nodes of a file are expressions."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from statements(child)


@functools.cache
def known_modules(folder: str) -> set[str]:
    return modules(folder).keys() | modules("gateway").keys() | modules("workers").keys()


@functools.cache
def imports(path: Path) -> set[str]:
    """Returns the modules that a file imports anywhere."""
    known, found = known_modules(path.parts[0]), set()
    for node in statements(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in names}
    return found


# Who may know whom: a module imports those of its own row and of the earlier rows, never those of a later one.
LAYERS = [
    "gateway.errors gateway.ids gateway.log gateway.cancellation gateway.settings gateway.validation",
    "gateway.keys",
    "gateway.redis gateway.outbound gateway.storage gateway.pages",
    "gateway.loops",
    "gateway.accounts",
    "gateway.events gateway.telemetry",
    "gateway.data gateway.deploys gateway.monitors",
    "gateway.inference",
    "gateway.operations",
    "gateway.services",
    "gateway.api",
    "gateway.mcp",
    "gateway.app gateway.server",
]
# The workers know the gateway up to its operations, and each other in this order.
WORKERS = [
    "workers.stream workers.heartbeat workers.child",
    "workers.sandbox workers.webhooks workers.monitors",
    "workers.engine",
    "workers.hosting",
    "workers.kubernetes workers.builds workers.backup",
    "workers.check workers.doctor workers.restarts",
    "workers.__main__",
]
PROGRAM = ["capsule_gateway.dev", "capsule_gateway.cli", "capsule_gateway capsule_gateway.__main__ capsule_gateway.pod"]
ABOVE_WORKERS = {"gateway.services", "gateway.api", "gateway.mcp", "gateway.app", "gateway.server"}
HEIGHTS = {room: height for height, row in enumerate([*LAYERS, *WORKERS, *PROGRAM]) for room in row.split()}


def room(module: str) -> str:
    """Returns `gateway.events` for `gateway.events.webhooks`, and the module itself if it is in no folder."""
    return ".".join(module.split(".")[:2])


def crossings() -> Iterator[tuple[str, str]]:
    """Yields the importing and the imported module of all imports between rooms of the service."""
    for folder in ("capsule_gateway", "gateway", "workers"):
        for module, path in modules(folder).items():
            for imported in sorted(imports(path)):
                if room(imported) in HEIGHTS and room(module) in HEIGHTS:
                    yield module, imported


# -- imports -------------------------------------------------------------------------------------------------


def test_each_module_knows_only_those_below() -> None:
    """The rows of the tables stand above each other. Ruff checks that the command line imports workers late."""
    rooms = {room(module) for folder in ("capsule_gateway", "gateway", "workers") for module in modules(folder)}
    assert rooms - {"gateway", "workers"} == set(HEIGHTS)
    up = [(a, b) for a, b in crossings() if room(a) != room(b) and HEIGHTS[room(b)] > HEIGHTS[room(a)]]
    above = [(a, b) for a, b in crossings() if a.startswith("workers") and room(b) in ABOVE_WORKERS]
    assert not up + above, up + above


def test_agent_tools_call_no_route() -> None:
    """What both a route and a tool do is a method of one of the services that a process builds."""
    found = {
        (str(path), name)
        for path in python_files("gateway/mcp")
        for name in imports(path)
        if name.startswith("gateway.api.") and "ROUTES" in names(modules("gateway")[name])
    }
    assert not found, found


@pytest.mark.parametrize("name", [str, room], ids=["modules", "folders"])
def test_no_import_cycle(name: Callable[[str], str]) -> None:
    graph: dict[str, set[str]] = {}
    for module, imported in crossings():
        if name(module) != name(imported):
            graph.setdefault(name(module), set()).add(name(imported))
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(reversed(error.args[1])))


def test_each_third_party_import_is_declared() -> None:
    """Those of the service in `dependencies`, those of tests, benchmarks and tools in the groups for developers.

    Modules that need an extra import it when they use it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    service = distributions(project["project"]["dependencies"])
    extras = {name: distributions(needed) for name, needed in project["project"]["optional-dependencies"].items()}
    allowed = {
        "capsule_gateway": service,
        "gateway": service,
        "workers": service,
        "capsule_gateway/dev": service | extras["dev"],
        "gateway/storage.py": service | extras["s3"],
        str(OTLP): service | extras["otel"],
        "gateway/deploys/pod_log.py": service | extras["kubernetes"],
        "workers/kubernetes": service | extras["kubernetes"],
    }
    everything = service.union(distributions(groups["dev"]), *extras.values())
    provided_by = importlib.metadata.packages_distributions()
    undeclared = set()
    for folder in OURS:
        for path in set(python_files(folder)) - {LOCUSTFILE}:
            if path.parent == CLIENT_PROGRAMS:
                continue
            declared = allowed.get("/".join(path.parts[:2]), allowed.get(folder, everything))
            declared = allowed.get(str(path), declared)
            ours = {*OURS, *sys.stdlib_module_names, *(other.stem for other in (ROOT / path.parent).glob("*.py"))}
            for name in {imported.partition(".")[0] for imported in imports(path)} - ours:
                if not {plain(distribution) for distribution in provided_by.get(name, [])} & declared:
                    undeclared.add((name, str(path)))
    assert not undeclared, sorted(undeclared)


def test_only_one_module_imports_opentelemetry() -> None:
    """Ruff checks that it is imported in a function, so that a process imports neither while traces are off."""
    found = {path for path in service_files() if any(name.startswith("opentelemetry") for name in imports(path))}
    assert found == {OTLP}


def distributions(requirements: list[str]) -> set[str]:
    """Returns the required distributions, and those that their extras add, such as hiredis for `redis[hiredis]`."""
    found = set()
    for requirement in requirements:
        name, extras = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?.*", requirement).groups()
        found.add(plain(name))
        for extra in filter(None, (extras or "").split(",")):
            added = importlib.metadata.requires(name) or []
            found |= {
                plain(re.match(r"[\w.-]+", line)[0]) for line in added if re.search(rf"extra == .{extra}\b", line)
            }
    return found


def plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_no_process_is_started_by_the_name_of_our_module() -> None:
    """Only a process of the service has its modules on the path, so it starts `python -m capsule_gateway`."""
    started = re.compile(r'"-m",\s*"(gateway|workers)\b')
    assert not [str(path) for path in service_files() if started.search((ROOT / path).read_text())]


# -- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["capsule_gateway", "gateway", "workers"])
def test_no_package_of_a_single_module(folder: str) -> None:
    """A package whose `__init__.py` is all of it counts as a module."""
    packages = {path.parent for path in python_files(folder) if path.name == "__init__.py"}
    alone = [p for p in packages if len([*(ROOT / p).glob("*.py")]) == 2 and p != Path(folder)]
    assert not alone, alone


# -- tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["capsule_gateway", "gateway", "workers"])
def test_each_test_module_names_its_source(folder: str) -> None:
    """tests/gateway/inference/concurrency/test_permits_handler.py tests gateway/inference/concurrency/permits.py."""
    misplaced = []
    for path in python_files(f"tests/{folder}"):
        if path.name.startswith("test_"):
            source = ROOT / path.parent.relative_to("tests")
            names = {module.stem.strip("_") for module in source.glob("*.py")}
            names |= {
                package.name for package in source.glob("*/") if [*package.glob("*.py")] == [package / "__init__.py"]
            }
            if not any(f"{path.stem}_".startswith(f"test_{name}_") for name in names - {"init"}):
                misplaced.append(str(path))
    assert not misplaced, misplaced


def test_no_test_module_imports_another() -> None:
    """Helpers that several of them use are in tests/support or in a conftest."""
    found = [
        (str(path), name)
        for path in python_files("tests")
        for name in imports(path)
        if re.match(r"tests\..*\btest_", name)
    ]
    assert not found, found


def scripts() -> set[str]:
    """Returns the names of the Lua files that are scripts: scripts use the others."""
    texts = {path.stem: path.read_text() for path in (ROOT / "lua").rglob("*.lua")}
    used = {name for text in texts.values() for name in re.findall(r"^-- uses (?:\w+/)?(\w+)$", text, re.M)}
    return texts.keys() - used


def test_each_script_has_a_test_module() -> None:
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "lua").rglob("test_*.py")}
    assert scripts() <= tested


# -- Redis ---------------------------------------------------------------------------------------------------

KEYS = Path("gateway/keys.py")
RUNNING = {"Script", "run_script", "eval", "evalsha", "eval_ro", "evalsha_ro", "register_script", "script_load"}


def names(path: Path) -> Iterator[str]:
    """Yields all identifiers that a file defines or uses."""
    for node in nodes(path):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield from {name, other or name}
            case ast.MatchAs(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name


def test_each_script_has_one_function() -> None:
    """It is in the `scripts.py` of its domain, and only the client sends its commands."""
    calling = [path for path in service_files() if path.name == "scripts.py"]
    others = service_files(*map(str, calling), "gateway/redis/client.py")
    found = [(str(path), sorted(running)) for path in others if (running := RUNNING & {*names(path)})]
    assert not found, found
    functions = [node.name for path in calling for node in tree(path).body if isinstance(node, ast.AsyncFunctionDef)]
    assert sorted(functions) == sorted(scripts())


def key_patterns() -> list[str]:
    """Returns patterns of every declared key with more than one part, and of its part before the first variable."""
    names = [each.name.partition("[")[0] for each in keys.KEYS]
    assert len(names) > 30
    beginnings = [name.partition(":<")[0] for name in names]
    return [pattern(name) for name in {*names, *beginnings} if ":" in name]


def texts(path: Path) -> Iterator[str]:
    """Yields the texts of a file, without docstrings. `{}` stands for the values in an f-string."""
    skipped: set[ast.AST] = set()
    for node in nodes(path):
        if node in skipped:
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            skipped |= {*ast.walk(node)}
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_keys_are_built_in_their_module() -> None:
    """No other module has a text like a key, or builds a longer key from a key."""
    any_key = re.compile("|".join(key_patterns()))
    hash_tag = re.compile(r"\{(p\d\d|p%02d|ops|registrations)\}")
    found = []
    for path in service_files(str(KEYS)):
        found += [(str(path), text) for text in texts(path) if any_key.fullmatch(text) or hash_tag.search(text)]
        for node in nodes(path):
            if isinstance(node, ast.JoinedStr | ast.BinOp) and not isinstance(getattr(node, "op", None), ast.BitOr):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node.left, node.right]
                values = [part.value if isinstance(part, ast.FormattedValue) else part for part in parts]
                found += [(str(path), ast.unparse(node)) for value in values if makes_key(value)]
    assert not found, found


def makes_key(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=ast.Name(id=name)):
            return name.endswith(("_key", "_prefix", "_tag"))
    return False


# -- words ---------------------------------------------------------------------------------------------------


# Who seals values, and the kinds of records that have them. `gateway/operations/sealed.py` opens and reseals those.
SEALERS = {
    "gateway.accounts.app_fields": {"app", "serving"},  # the latter in the manifest of a release
    "gateway.accounts.vault": set[str](),
    "gateway.deploys.environment": {"environment", "preview-environment"},
    "gateway.events.notices": set[str](),  # in links, which are in no record
    "gateway.events.webhooks": {"webhook", "previous-secret"},
    "workers.builds.compiler": {"serving"},
}


def test_each_sealed_value_is_found() -> None:
    found = {
        module
        for folder in ("gateway", "workers", "capsule_gateway")
        for module, path in modules(folder).items()
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "seal"
    }
    assert found == SEALERS.keys()
    assert set.union(*SEALERS.values()) == SEALED.keys()
    assert {key.kind for key in keys.KEYS if "encrypted" in key.holds} == SEALED.keys()


def test_no_identifier_is_a_riddle() -> None:
    """Each of these had a dozen meanings."""
    riddles = {"told", "door", "doors", "felt", "penny", "desk", "haste", "beside"}
    used = {(str(path), name) for path in service_files() for name in names(path)}
    found = sorted((path, name) for path, name in used if riddles & {*name.lower().split("_")})
    assert not found, found
