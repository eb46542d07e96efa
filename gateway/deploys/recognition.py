"""Recognizes what a source is by its files: how to build it, and what to serve or start.

The rules are the rows of `NODE_RULES` and `PYTHON_RULES`; the first one that matches counts. The command line writes
the result to a `capsule.toml`, and the worker builds a source that has none by it. So both read a source in the same
way: plain files only, because links of a customer's source may point anywhere on the worker's machine.

In a build, only npm and `python3` are certain to be there. npm brings the other package managers of Node.js, and pip
brings uv and Poetry. Start commands call Python's programs as modules, because the programs in a virtual environment
contain its path.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gateway.accounts.records import PREVIEW, Build
from gateway.settings.toml import parse_toml
from gateway.text_files import decode_text

FILE_BYTES = 1_048_576  # of a file that is read; enough for any file that a person writes
LABEL_CHARACTERS = 63
PAGE = "index.html"
NAMED_PAGES = 3  # in a message


class Unrecognizable(ValueError):
    """The source is of a known kind, but lacks what a build needs. Account holders see the message."""


class Files(Protocol):
    def read(self, path: str) -> str:
        """Returns the text of a file, at most its first megabyte; an empty text if it is missing or no plain file."""

    def has(self, path: str) -> bool:
        """Returns whether there is a plain file."""


class Recognition(NamedTuple):
    rule: str  # such as "Vite"
    file: str  # by which it was recognized; empty for static files
    build: Build
    name: str = ""  # of the app, if a file names it: a DNS label

    def describe(self) -> str:
        """Returns a line for the log of a build."""
        if not self.file:
            return f"{self.rule}: serving the folder as it is"
        does = f"starting {self.build.start}" if self.build.start else f"serving {self.build.output}"
        return f"{self.rule} ({self.file}): {', '.join(filter(None, [self.build.command, does]))}"

    def summarize(self) -> str:
        """Returns what it builds and serves, such as `npm ci && npm run build → dist`."""
        if not self.file:
            return "serve the folder as it is"
        return " → ".join(filter(None, [self.build.command, self.build.start or self.build.output]))


def recognize(files: Files) -> Recognition:
    """Returns how to build and serve the source. Raises Unrecognizable."""
    project = _Node(files) if files.has(PACKAGE) else None
    return (
        _recognize_django(files)
        or (project and _recognize_node(project))
        or _recognize_python(files)
        or Recognition("static files", "", Build(output="."), project.name if project else "")
    )


def make_label(name: str) -> str:
    """Returns the name as a DNS label that an app can have; an empty text if nothing of it can be used."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:LABEL_CHARACTERS].rstrip("-")
    return label.removesuffix("-preview") if PREVIEW.fullmatch(label) else label


# -- Node.js -------------------------------------------------------------------------------------------------

PACKAGE = "package.json"
SUFFIXES = ("js", "mjs", "cjs", "ts", "mts")  # of configuration files
# A comment that does not end reaches to the end. Otherwise, thousands of them would take minutes.
COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)|(?<![:\w])//[^\n]*", re.DOTALL)


class NodeRule(NamedTuple):
    name: str
    packages: tuple[str, ...]  # one of them is a dependency
    build: str  # the tool's own command, for projects without a `build` script
    output: str = ""
    start: str = ""  # without this and an output, the `start` script
    configurations: tuple[str, ...] = ()  # the files, without suffixes, one of which contains the pattern
    pattern: str = ""
    problem: str = ""  # why the project can't be deployed


# Tools that are built on others come first: most projects here depend on Vite too.
NODE_RULES = [
    NodeRule("SvelteKit", ("@sveltejs/kit",), "vite build", start="node build",
             configurations=("svelte.config", "vite.config"), pattern="@sveltejs/adapter-node"),
    NodeRule("SvelteKit", ("@sveltejs/kit",), "vite build", "build",
             configurations=("svelte.config", "vite.config"), pattern="@sveltejs/adapter-static"),
    NodeRule("SvelteKit", ("@sveltejs/kit",), "vite build",
             problem="SvelteKit needs an adapter for this service: use @sveltejs/adapter-node for a server, or"
                     " @sveltejs/adapter-static for files, in svelte.config.js or vite.config.ts"),
    NodeRule("Next.js", ("next",), "next build", "out",
             configurations=("next.config",), pattern=r"\boutput['\"]?\s*:\s*['\"`]export['\"`]"),
    NodeRule("Next.js", ("next",), "next build", start='node_modules/.bin/next start -H $HOST -p $PORT'),
    NodeRule("Nuxt", ("nuxt",), "nuxt build", start="node .output/server/index.mjs"),
    NodeRule("React Router", ("@react-router/dev",), "react-router build"),
    NodeRule("Remix", ("@remix-run/dev", "@remix-run/serve"), "remix vite:build"),
    NodeRule("Gatsby", ("gatsby",), "gatsby build", "public"),
    NodeRule("Angular", ("@angular/build", "@angular-devkit/build-angular"), "ng build", "dist/{project}"),
    NodeRule("Astro", ("astro",), "astro build", "dist"),
    NodeRule("Eleventy", ("@11ty/eleventy",), "eleventy", "_site"),
    NodeRule("Vue CLI", ("@vue/cli-service",), "vue-cli-service build", "dist"),
    NodeRule("Create React App", ("react-scripts",), "react-scripts build", "build"),
    NodeRule("Vite", ("vite",), "vite build", "dist"),
]  # fmt: skip


class Manager(NamedTuple):
    """A package manager of Node.js."""

    install: str
    package: str = ""  # that npm brings it with; empty: npm itself
    program: str = "npm"
    environment: str = ""

    def command(self, *scripts: str) -> str:
        """Returns a command that installs the packages, then runs the scripts with the manager."""
        steps = " && ".join([self.install, *(f"{self.program} run {script}" for script in scripts)])
        return f"{self.environment}npx -y -p {self.package} -c '{steps}'" if self.package else steps


class _Node:
    """A project with a package.json."""

    def __init__(self, files: Files) -> None:
        self.files = files
        try:
            package = json.loads(files.read(PACKAGE))
        except (ValueError, RecursionError) as error:
            raise Unrecognizable(f"{PACKAGE} is not valid JSON: {error}") from None
        package = package if isinstance(package, dict) else {}
        self.packages = {*_table(package, "dependencies"), *_table(package, "devDependencies")}
        self.scripts = {name for name, script in _table(package, "scripts").items() if isinstance(script, str)}
        self.name = make_label(_text(package, "name").rpartition("/")[2])
        self.manager = _choose_manager(files, _text(package, "packageManager"))

    def matches(self, rule: NodeRule) -> bool:
        if self.packages.isdisjoint(rule.packages):
            return False
        names = [f"{name}.{suffix}" for name in rule.configurations for suffix in SUFFIXES]
        texts = (COMMENT.sub("", self.files.read(name)) for name in names)
        return not rule.pattern or any(re.search(rule.pattern, text) for text in texts)

    def build_with(self, tool: str) -> str:
        """Returns the command that builds the project, with its own script or else with the tool."""
        if "build" in self.scripts:
            return self.manager.command("build")
        return f"{self.manager.command()} && npx {tool}"


def _recognize_node(project: _Node) -> Recognition | None:
    rule = next(filter(project.matches, NODE_RULES), None)
    if rule is None:
        if "start" not in project.scripts:
            return None
        command = project.manager.command(*{"build"} & project.scripts)
        return Recognition("Node.js", PACKAGE, Build(command, start="npm start"), project.name)
    if rule.problem:
        raise Unrecognizable(rule.problem)
    if not rule.output and not rule.start and "start" not in project.scripts:
        raise Unrecognizable(f"{rule.name} needs a `start` script in {PACKAGE}")
    command = project.build_with(rule.build)
    if not rule.output:
        return Recognition(rule.name, PACKAGE, Build(command, start=rule.start or "npm start"), project.name)
    output = rule.output if "{" not in rule.output else _find_angular_output(project)
    return Recognition(rule.name, PACKAGE, Build(command, output), project.name)


def _choose_manager(files: Files, field: str) -> Manager:
    """Returns the package manager by the field `packageManager` of package.json, or else by the lock file."""
    found = re.match(r"(npm|pnpm|yarn|bun)@(\d[\w.-]{0,40})", field, re.ASCII)
    name, version = found.groups() if found else ("", "")
    if name == "pnpm" or (not name and files.has("pnpm-lock.yaml")):
        lock = files.read("pnpm-lock.yaml")
        frozen = "--frozen-lockfile" if lock else "--no-frozen-lockfile"
        return Manager(f"pnpm install {frozen}", f"pnpm@{version or _find_pnpm(lock)}", "pnpm")
    if name == "yarn" or (not name and files.has("yarn.lock")):
        lock = files.read("yarn.lock")
        if version.startswith(("0.", "1.")) or (not version and "__metadata:" not in lock):
            return Manager(f"yarn install{' --frozen-lockfile' * bool(lock)}", f"yarn@{version or 1}", "yarn")
        # Start commands find packages in node_modules, whichever way of linking the project uses elsewhere.
        install, linker = f"yarn install --{'' if lock else 'no-'}immutable", "YARN_NODE_LINKER=node-modules "
        return Manager(install, f"@yarnpkg/cli-dist@{version or 4}", "yarn", linker)
    if name == "bun" or (not name and (files.has("bun.lock") or files.has("bun.lockb"))):
        is_locked = files.has("bun.lock") or files.has("bun.lockb")
        return Manager(f"bun install{' --frozen-lockfile' * is_locked}", f"bun@{version or 1}", "bun")
    locked = files.has("package-lock.json") or files.has("npm-shrinkwrap.json")
    return Manager("npm ci" if locked else "npm install")


def _find_pnpm(lock: str) -> str:
    """Returns the version of pnpm that reads this format of its lock file."""
    found = re.search(r"^lockfileVersion:\s*['\"]?(\d+)", lock, re.MULTILINE)
    return {"5": "7", "6": "8"}.get(found[1] if found else "", "10")


def _find_angular_output(project: _Node) -> str:
    """Returns the folder that Angular builds its first project, or the default one, to."""
    try:
        workspace = json.loads(project.files.read("angular.json"))
    except (ValueError, RecursionError) as error:
        raise Unrecognizable(f"angular.json is missing, or is not valid JSON: {error}") from None
    projects = _table(workspace, "projects")
    name = _text(workspace, "defaultProject") or next(iter(projects), "app")
    targets = _table(projects, name)
    target = _table(targets, "architect", "build") or _table(targets, "targets", "build")
    path = _table(target, "options").get("outputPath")
    base, browser = (_text(path, "base"), path.get("browser")) if isinstance(path, dict) else (path, None)
    base = base if isinstance(base, str) and base else f"dist/{name}"
    if ":application" not in _text(target, "builder") and target:
        return base  # the builder of Angular 16 and older
    return "/".join(filter(None, [base.rstrip("/"), browser if isinstance(browser, str) else "browser"]))


def _table(value: Any, *names: str) -> dict[str, Any]:
    """Returns the table at this path of names; an empty one if there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _text(value: Any, name: str) -> str:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, str) else ""


# -- Python --------------------------------------------------------------------------------------------------

REQUIREMENTS, PROJECT, MANAGE = "requirements.txt", "pyproject.toml", "manage.py"
VENV = "python3 -m venv .venv"
PYTHON = ".venv/bin/python"
UV = ".venv/bin/pip install uv"
ENTRIES = ("main.py", "app.py", "wsgi.py", "app/main.py")
MODULE = r"[A-Za-z_]\w{0,99}"
APP = re.compile(r"^app\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE)
FACTORY = re.compile(r"^def create_app\(", re.MULTILINE)
UVICORN = f"{PYTHON} -m uvicorn {{factory}}{{app}} --host $HOST --port $PORT"
GUNICORN = f"{PYTHON} -m gunicorn --bind $HOST:$PORT {{app}}"


class PythonRule(NamedTuple):
    name: str
    package: str  # is required
    server: str  # the package that is installed if the project does not require it
    start: str
    factory: str  # how the server names a function that makes the app; `{}` is the module


PYTHON_RULES = [
    PythonRule("FastAPI", "fastapi", "uvicorn", UVICORN, "{}:create_app"),
    PythonRule("Starlette", "starlette", "uvicorn", UVICORN, "{}:create_app"),
    PythonRule("Flask", "flask", "gunicorn", GUNICORN, "'{}:create_app()'"),
]


class _Python:
    """A project with a requirements.txt or a pyproject.toml."""

    def __init__(self, files: Files) -> None:
        self.files = files
        try:
            project = parse_toml(files.read(PROJECT))
        except ValueError as error:
            raise Unrecognizable(f"{PROJECT} is not valid TOML: {error}") from None
        listed = _table(project, "project").get("dependencies")
        lines = [*files.read(REQUIREMENTS).splitlines(), *(listed if isinstance(listed, list) else [])]
        lines += _table(project, "tool", "poetry", "dependencies")
        names = (re.match(r"\s*([A-Za-z0-9][\w.-]*)", line, re.ASCII) for line in lines if isinstance(line, str))
        self.packages = {re.sub(r"[-_.]+", "-", found[1]).lower() for found in names if found}
        self.name = make_label(
            _text(_table(project, "project"), "name") or _text(_table(project, "tool", "poetry"), "name")
        )
        self.file, self._install = _choose_install(files, project)

    def install(self, server: str) -> str:
        """Returns the command that makes the virtual environment with the project's packages and the server."""
        added = [] if server in self.packages else [f".venv/bin/pip install {server}"]
        return " && ".join([VENV, self._install, *added])


def _choose_install(files: Files, project: dict[str, Any]) -> tuple[str, str]:
    """Returns the file that names the packages, and the command that installs them into the virtual environment.

    An app is rarely a package that can be built, and it runs from its source. So the app itself is installed only where
    its file says how to build it.
    """
    backend = _text(_table(project, "build-system"), "build-backend")
    is_poetrys = backend.startswith("poetry.") or bool(_table(project, "tool", "poetry", "dependencies"))
    if files.has("uv.lock"):
        # Otherwise, uv would look for the Python of `.python-version`, which the host may lack.
        sync = f"uv sync --frozen --inexact --no-dev --no-python-downloads --python {PYTHON}"
        return PROJECT, f"{UV} && .venv/bin/{sync}"
    if files.has("poetry.lock") or (is_poetrys and not files.has(REQUIREMENTS)):
        # Poetry must not change the environment that it runs in.
        install = "POETRY_VIRTUALENVS_IN_PROJECT=true ~/poetry/bin/poetry install --only main --no-root"
        return PROJECT, f"python3 -m venv ~/poetry && ~/poetry/bin/pip install poetry && {install}"
    if files.has(REQUIREMENTS):
        return REQUIREMENTS, f".venv/bin/pip install -r {REQUIREMENTS}"
    if not _table(project, "build-system"):
        return PROJECT, f"{UV} && .venv/bin/uv pip install --python {PYTHON} -r {PROJECT}"
    return PROJECT, ".venv/bin/pip install ."


def _recognize_python(files: Files) -> Recognition | None:
    project = _Python(files)
    rule = next((rule for rule in PYTHON_RULES if rule.package in project.packages), None)
    if rule is None:
        return None
    for entry in ENTRIES:
        text, module = files.read(entry), entry.removesuffix(".py").replace("/", ".")
        if APP.search(text):
            start = rule.start.format(app=f"{module}:app", factory="")
        elif FACTORY.search(text):
            start = rule.start.format(app=rule.factory.format(module), factory="--factory ")
        else:
            continue
        return Recognition(rule.name, project.file, Build(project.install(rule.server), start=start), project.name)
    found = f"{', '.join(ENTRIES[:-1])} or {ENTRIES[-1]}"
    raise Unrecognizable(f"{project.file} requires {rule.name}, but no app or create_app is defined in {found}")


def _recognize_django(files: Files) -> Recognition | None:
    manage = files.read(MANAGE)
    if "django" not in manage:
        return None
    if not files.has(REQUIREMENTS) and not files.has(PROJECT):
        raise Unrecognizable(f"{MANAGE} needs Django, but there is no {REQUIREMENTS} or {PROJECT} that requires it")
    found = re.search(rf"DJANGO_SETTINGS_MODULE['\"]\s*,\s*['\"]({MODULE}(?:\.{MODULE}){{0,9}})['\"]", manage, re.ASCII)
    if found is None:
        raise Unrecognizable(f"{MANAGE} does not set DJANGO_SETTINGS_MODULE")
    project, settings = _Python(files), found[1].split(".")
    command, texts = project.install("gunicorn"), [*_read_settings(files, settings)]
    if re.findall(r"^[^#\n]*\bALLOWED_HOSTS\b[^\r\n]*", "\n".join(texts), re.MULTILINE) == ["ALLOWED_HOSTS = []"]:
        raise Unrecognizable(
            f"ALLOWED_HOSTS of {found[1]} is empty, so Django answers no visitor: set it to"
            ' [urlsplit(os.environ["APP_URL"]).hostname], and see what else the documentation of Django projects names'
        )
    if any(re.search(r"^STATIC_ROOT\s*=", text, re.MULTILINE) for text in texts):
        command += f" && {PYTHON} {MANAGE} collectstatic --noinput"
    start = f"{PYTHON} {MANAGE} migrate --noinput && exec {GUNICORN.format(app=f'{settings[0]}.wsgi')}"
    return Recognition("Django", MANAGE, Build(command, start=start), project.name)


def _read_settings(files: Files, module: list[str]) -> Iterator[str]:
    """Yields the texts that may contain the settings: the module, and the usual ones that it imports."""
    path = "/".join(module)
    yield files.read(f"{path}.py")
    yield files.read(f"{path}/__init__.py")
    yield files.read(f"{'/'.join(module[:-1])}/base.py")


# -- reading a folder ----------------------------------------------------------------------------------------


class SourceFolder:
    """The files of a source in a folder. Follows no link."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, path: str) -> str:
        with ExitStack() as files:
            file = self._open(path, files)
            if file is None:
                return ""
            with open(file, "rb", closefd=False) as content:
                return decode_text(content.read(FILE_BYTES))

    def has(self, path: str) -> bool:
        with ExitStack() as files:
            return self._open(path, files) is not None

    def _open(self, path: str, files: ExitStack) -> int | None:
        """Opens each folder on the way without following links. Returns None unless there is a plain file."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        *folders, name = path.split("/")
        try:
            at = os.open(self._folder, flags | os.O_DIRECTORY)
            files.callback(os.close, at)
            for folder in folders:
                at = os.open(folder, flags | os.O_DIRECTORY, dir_fd=at)
                files.callback(os.close, at)
            file = os.open(name, flags, dir_fd=at)
            files.callback(os.close, file)
            return file if stat.S_ISREG(os.fstat(file).st_mode) else None
        except OSError:  # it is missing, or a link, or may not be read
            return None


def explain_missing_page(source: Path, served: str = ".") -> str | None:
    """Returns what is wrong with a source of which a folder is served as it is; None if that has a page at the top.

    The message names the pages further down that are nearest to the top. No link is followed.
    """
    folder = source / served
    if os.path.lexists(folder / PAGE) or not folder.is_dir():
        return None
    top = "the top of what you published" if folder == source else f"the top of {served}"
    nearest = [*islice(_find_pages(source), NAMED_PAGES + 1)]
    pages = [path.relative_to(source).as_posix() for path in nearest[:NAMED_PAGES]]
    more = ["…"] if len(nearest) > NAMED_PAGES else []
    return f"There is no {PAGE} at {top}" + (f"; found: {', '.join(pages + more)}" if pages else "")


def _find_pages(source: Path) -> Iterator[Path]:
    """Yields the pages in all folders, nearest to the top first."""
    pending = deque([source])
    while pending:
        try:
            entries = sorted(os.scandir(pending.popleft()), key=lambda entry: entry.name)
        except OSError:  # such as too long a path
            continue
        for entry in entries:
            if entry.name == PAGE:
                yield Path(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
