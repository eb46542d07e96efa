"""Recognizes what a source is by its files: how to build it, and what to serve or start.

The rules are the rows of `NODE_RULES` and `PYTHON_RULES`; the first one that matches counts. The rows of `UNBUILT` are
recognized, but not built (`unbuilt.py`). The command line writes the result to a `capsule.toml`, and the worker builds
a source that has none by it. So both read a source in the same way: plain files only, because links of a customer's
source may point anywhere on the worker's machine.

In a build, only npm and `python3` are certain to be there. npm installs the other package managers of Node.js into the
release, and pip brings uv and Poetry. Start commands call Python's programs as modules, because the programs in a
virtual environment contain its path.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from gateway.accounts.records import PREVIEW, Build
from gateway.deploys.unbuilt import PAGE, Files, explain_unbuilt, write_settings
from gateway.settings.text_files import decode_text
from gateway.settings.toml import parse_toml

FILE_BYTES = 1_048_576  # of a file that is read; enough for any file that a person writes
LABEL_CHARACTERS = 63
FALLBACK, REDIRECTS = "200.html", "_redirects"
NAMED_PAGES = 3  # in a message


class Unrecognizable(ValueError):
    """The source is of a known kind, but lacks what a build needs. Account holders see the message."""


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
    if project and (reason := explain_unbuilt(files, with_package=True)):
        raise Unrecognizable(reason)
    found = _recognize_django(files) or (project and _recognize_node(project)) or _recognize_python(files)
    if found:
        return found
    if reason := explain_unbuilt(files):
        raise Unrecognizable(reason)
    if project:
        _require_tool(project)
    return Recognition("static files", "", Build(output="."), project.name if project else "")


def make_label(name: str) -> str:
    """Returns the name as a DNS label that an app can have; an empty text if nothing of it can be used."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:LABEL_CHARACTERS].rstrip("-")
    return label.removesuffix("-preview") if PREVIEW.fullmatch(label) else label


# -- Node.js -------------------------------------------------------------------------------------------------

PACKAGE = "package.json"
SUFFIXES = ("js", "mjs", "cjs", "ts", "mts")  # of configuration files
# A comment that does not end reaches to the end. Otherwise, thousands of them would take minutes.
COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)|(?<![:\w])//[^\n]*", re.DOTALL)
# A folder: "build", "./build" or path.resolve(__dirname, "build") in a configuration, also without quotes in a script.
FOLDER = (
    r"(?:(?<=:)\s*(?P<absolute>[\w.]*(?:resolve|join)\([^'\"`;{}]{0,200},\s*)?['\"`]|(?<!:)['\"]?)"
    r"(?P<folder>\w[\w./-]*|\.{1,2}/[\w./-]*)"
)


# `ssr: false` of the whole app, which is indented once. A rule of some routes has it too, but deeper.
NUXT_FILES = r"(?m)(?:^(?: {1,4}|\t)|\bdefineNuxtConfig\(\{ *|\bexport default \{ *)ssr\s*:\s*false\b"


class NodeRule(NamedTuple):
    name: str
    packages: tuple[str, ...]  # one of them is a dependency
    build: str  # the tool's own command, for projects without any of the scripts
    output: str = ""
    start: str = ""
    scripts: tuple[str, ...] = ("build",)  # the first one that a project has builds it; () for the tool's own
    configurations: tuple[str, ...] = ()  # files without suffixes; one of them or the script contains the pattern
    pattern: str = ""
    named: str = ""  # what precedes the name of another output, in the script or a configuration
    problem: str = ""  # why the project can't be deployed

    @property
    def needs_start(self) -> bool:
        """Whether the `start` script starts the app."""
        return not (self.output or self.start or self.problem)


# Tools that are built on others come first: most projects here depend on Vite too.
NODE_RULES = [
    NodeRule("SvelteKit", ("@sveltejs/kit",), "vite build", start="node build",
             configurations=("svelte.config", "vite.config"), pattern="@sveltejs/adapter-node"),
    NodeRule("SvelteKit", ("@sveltejs/kit",), "vite build", "build",
             configurations=("svelte.config", "vite.config"), pattern="@sveltejs/adapter-static", named=r"\bpages\s*:"),
    NodeRule("SvelteKit", ("@sveltejs/kit",), "vite build",
             problem="SvelteKit needs an adapter for this service: use @sveltejs/adapter-node for a server, or"
                     " @sveltejs/adapter-static for files, in svelte.config.js or vite.config.ts"),
    NodeRule("Next.js", ("next",), "next build", "out",
             configurations=("next.config",), pattern=r"\boutput['\"]?\s*:\s*['\"`]export['\"`]|\bnext export\b",
             named=r"\bdistDir\s*:|\bnext export -o "),
    NodeRule("Next.js", ("next",), "next build", start='node_modules/.bin/next start -H $HOST -p $PORT'),
    NodeRule("Nuxt", ("nuxt",), "nuxt generate", ".output/public", pattern=r"\b(?:nuxt|nuxi) generate\b"),
    NodeRule("Nuxt", ("nuxt",), "nuxt generate", ".output/public", scripts=(),
             configurations=("nuxt.config",), pattern=NUXT_FILES),
    NodeRule("Nuxt", ("nuxt",), "nuxt build", start="node .output/server/index.mjs"),
    NodeRule("React Router", ("@react-router/dev",), "react-router build", "build/client",
             configurations=("react-router.config",), pattern=r"\bssr\s*:\s*false\b"),
    NodeRule("React Router", ("@react-router/dev",), "react-router build"),
    NodeRule("Remix", ("@remix-run/dev",), "remix vite:build", "build/client",
             configurations=("vite.config",), pattern=r"\bssr\s*:\s*false\b"),
    NodeRule("Remix", ("@remix-run/dev", "@remix-run/serve"), "remix vite:build"),
    NodeRule("TanStack Start", ("@tanstack/react-start", "@tanstack/solid-start"), "vite build"),
    NodeRule("AdonisJS", ("@adonisjs/core",), "node ace build", start="cd build && exec node bin/server.js"),
    NodeRule("Gatsby", ("gatsby",), "gatsby build", "public"),
    NodeRule("Angular", ("@angular/build", "@angular-devkit/build-angular"), "ng build", "dist/{project}"),
    NodeRule("Astro", ("astro",), "astro build", start="node dist/server/entry.mjs",
             configurations=("astro.config",), pattern="@astrojs/node"),
    NodeRule("Astro", ("astro",), "astro build",
             configurations=("astro.config",), pattern="@astrojs/(?:vercel|netlify|cloudflare)",
             problem="Astro needs an adapter for this service: use @astrojs/node for a server, or none for files, in"
                     " astro.config"),
    NodeRule("Astro", ("astro",), "astro build", "dist",
             configurations=("astro.config",), named=r"\boutDir\s*:|--outDir[ =]"),
    NodeRule("Docusaurus", ("@docusaurus/core",), "docusaurus build", "build", named=r"--out-dir[ =]"),
    NodeRule("VitePress", ("vitepress",), "vitepress build docs", "{folder}/.vitepress/dist",
             scripts=("docs:build", "build")),
    NodeRule("VuePress", ("vuepress", "@vuepress/cli"), "vuepress build docs", "{folder}/.vuepress/dist",
             scripts=("docs:build", "build")),
    NodeRule("Hexo", ("hexo",), "hexo generate", "public"),
    NodeRule("Eleventy", ("@11ty/eleventy",), "eleventy", "_site",
             configurations=(".eleventy", "eleventy.config"), named=r"\boutput\s*:|--output[ =]"),
    NodeRule("Ember", ("ember-source",), "ember build --environment=production", "dist",
             named=r"(?:--output-path|-o)[ =]"),
    NodeRule("Vue CLI", ("@vue/cli-service",), "vue-cli-service build", "dist",
             configurations=("vue.config",), named=r"\boutputDir\s*:|--dest[ =]"),
    NodeRule("Create React App", ("react-scripts",), "react-scripts build", "build", named=r"\bBUILD_PATH="),
    NodeRule("Rsbuild", ("@rsbuild/core",), "rsbuild build", "dist",
             configurations=("rsbuild.config",),
             named=r"\bdistPath\s*:\s*(?:\{[^}]{0,200}\broot\s*:)?|--dist-path[ =]"),
    NodeRule("Parcel", ("parcel", "parcel-bundler"), "parcel build", "dist", named=r"--dist-dir[ =]"),
    NodeRule("Storybook", ("storybook",), "storybook build", "storybook-static", scripts=("build-storybook",),
             named=r"(?:--output-dir|-o)[ =]"),
    NodeRule("Storybook", ("storybook",), "storybook build", "storybook-static",
             pattern=r"\bstorybook build\b|\bbuild-storybook\b", named=r"(?:--output-dir|-o)[ =]"),
    NodeRule("Vite", ("vite",), "vite build", "dist",
             configurations=("vite.config",), named=r"\boutDir\s*:|--outDir[ =]"),
    NodeRule("webpack", ("webpack",), "webpack --mode production", "dist",
             configurations=("webpack.config", "webpack.common", "webpack.prod"), pattern="html-webpack-plugin",
             named=r"\bpath\s*:|(?:--output-path|-o)[ =]"),
]  # fmt: skip

# A `start` script that runs one of these shows pages to those who work on them, and is no server of the project's own.
PAGE_SERVERS = {rule.build.split()[0] for rule in NODE_RULES} | {
    *("browser-sync", "http-server", "lite-server", "live-server", "serve", "sirv", "webpack-dev-server"),
    *("craco", "nuxi", "react-app-rewired", "react-router-serve", "remix-serve", "start-storybook"),
    *("electron", "expo", "ionic", "tauri"),
}
# What may come before the name of a program.
PREFIXES = {
    *("npx", "pnpx", "bunx", "env", "exec", "cross-env", "cross-env-shell", "dotenv", "dotenvx", "env-cmd"),
    *("run", "run-script", "dlx", "x", "start"),
}
MAX_SCRIPTS = 50  # that run each other, from `start` on
# A script that builds packages of a workspace.
DELEGATES = re.compile(r"\b(?:turbo|nx|lerna)\b|\s(?:-r|-w|--recursive|--filter|--workspaces?)\b|\bworkspaces?\s")

ENTRY = re.compile(r"\w[\w./-]{0,200}\.[jt]sx?", re.ASCII)
MANAGER = ".capsule"  # the folder of the package manager, in that of the project
LOCKS = {
    "pnpm": ("pnpm-lock.yaml",),
    "yarn": ("yarn.lock",),
    "bun": ("bun.lock", "bun.lockb"),
    "npm": ("package-lock.json", "npm-shrinkwrap.json"),
}


class Manager(NamedTuple):
    """A package manager of Node.js. npm installs the others into the release, where start commands find them too."""

    install: str
    program: str = "npm"
    package: str = ""  # that npm installs; empty: npm itself
    variable: str = ""  # that the manager needs whenever it runs

    def build(self, *steps: str) -> str:
        """Returns a command that installs the packages, then runs the steps."""
        manager = [f"npm install -g --prefix {MANAGER} {self.package}", self._path] if self.package else []
        variable = [f"export {self.variable}"] if self.variable else []
        return " && ".join([*manager, *variable, self.install, *steps])

    def run(self, script: str) -> str:
        return f"{self.program} run {script}"

    def build_package(self, name: str) -> str:
        """Returns a command that runs the `build` script of a package of the workspace."""
        words = {
            "npm": f"run build -w {name}",
            "pnpm": f"--filter {name} run build",
            "yarn": f"workspace {name} run build",
            "bun": f"run --filter {name} build",
        }
        return self.build(f"{self.program} {words[self.program]}")

    def start(self, command: str) -> str:
        """Returns a start command that finds the manager."""
        return " ".join(filter(None, [self._path, self.variable, command])) if self.package else command

    @property
    def _path(self) -> str:
        return f"PATH=$PWD/{MANAGER}/bin:$PATH"


class _Node:
    """A project with a package.json."""

    def __init__(self, files: Files) -> None:
        self.files = files
        try:
            package = json.loads(files.read(PACKAGE))
        except (ValueError, RecursionError) as error:
            raise Unrecognizable(f"{PACKAGE} is not valid JSON: {error}") from None
        self.package = package if isinstance(package, dict) else {}
        self.packages = {**_table(package, "devDependencies"), **_table(package, "dependencies")}
        self.scripts = {name: text for name, text in _table(package, "scripts").items() if isinstance(text, str)}
        self.name = make_label(_text(package, "name").rpartition("/")[2])
        self.manager = self._choose_manager()

    def matches(self, rule: NodeRule) -> bool:
        if self.packages.keys().isdisjoint(rule.packages):
            return False
        if rule.scripts and "build" not in rule.scripts and ("build" in self.scripts or not self.find_script(rule)):
            return False  # a tool beside the one that builds the project
        return not rule.pattern or self.find(rule, rule.pattern) is not None or self._names_adapter(rule)

    def _names_adapter(self, rule: NodeRule) -> bool:
        """Returns whether a dependency decides, because there is no configuration."""
        configured = any(map(self.files.has, _configurations(rule)))
        return not configured and any(re.fullmatch(rule.pattern, name) for name in self.packages)

    def find(self, rule: NodeRule, pattern: str) -> re.Match[str] | None:
        """Returns the first match in the script that builds the project or a configuration, without their comments."""
        texts = [self.read_script(rule), *map(self.files.read, _configurations(rule))]
        return next(filter(None, (re.search(pattern, COMMENT.sub("", text)) for text in texts)), None)

    def find_script(self, rule: NodeRule) -> str | None:
        """Returns the name of the script that builds the project, if there is one."""
        return next((name for name in rule.scripts if name in self.scripts), None)

    def read_script(self, rule: NodeRule) -> str:
        return self.scripts.get(self.find_script(rule) or "", "")

    def build_with(self, rule: NodeRule) -> str:
        """Returns the command that builds the project, with its own script or else with the tool."""
        script = self.find_script(rule)
        return self.manager.build(self.manager.run(script) if script else f"npx {rule.build}")

    def start(self) -> str:
        """Returns the command that runs the `start` script."""
        return self.manager.start("npm start" if self.manager.program == "npm" else self.manager.run("start"))

    @property
    def workspace(self) -> str:
        """The file that makes this the root of a workspace; empty if there is none."""
        if "workspaces" in self.package:
            return PACKAGE
        if re.search(r"^packages:", self.files.read("pnpm-workspace.yaml"), re.MULTILINE):
            return "pnpm-workspace.yaml"
        return "lerna.json" if self.files.has("lerna.json") else ""

    def has_server(self, rule: NodeRule | None) -> bool:
        """Returns whether the `start` script runs a server of the project's own."""
        if "start" not in self.scripts:
            return False
        if rule is None:
            return not self.files.has(PAGE) or not self._shows_pages("start", {})
        return not rule.start.endswith(self.scripts["start"].strip()) and not self._shows_pages("start", {})

    def _shows_pages(self, script: str, known: dict[str, bool]) -> bool:
        """Returns whether all that a script leaves running shows pages. `known`: the scripts that were asked for."""
        if script not in known and len(known) < MAX_SCRIPTS:
            known[script] = False  # a script that runs one of its own name means that of another package
            last = re.split(r"&&|\|\||;", self.scripts[script].rstrip("; "))[-1]
            commands = re.split(r"(?<![>&])&(?!>)", last)
            known[script] = all(self._is_page_server(command, known) for command in commands)
        return known.get(script, False)

    def _is_page_server(self, command: str, known: dict[str, bool]) -> bool:
        managed = node = False
        for word in command.replace('"', "").replace("'", "").split():
            folder, _, name = word.rpartition("/")
            if managed and word in self.scripts:
                return self._shows_pages(word, known)
            if word in LOCKS:
                managed = True
            elif word == "node":
                node = True
            elif "node_modules" in folder:
                return name.removesuffix(".js") in PAGE_SERVERS
            elif word not in PREFIXES and not word.startswith(("-", ".env")) and "=" not in word:
                return name in PAGE_SERVERS and not node and folder[:1] in ("", "@")
        return True

    def find_entry(self) -> str | None:
        """Returns the file that Bun runs in a project without a `start` script."""
        named = [_text(self.package, key).removeprefix("./") for key in ("module", "main")]
        entries = [*(name for name in named if ENTRY.fullmatch(name)), "src/index.ts", "index.ts"]
        return next(filter(self.files.has, entries), None) if self.manager.program == "bun" else None

    def _choose_manager(self) -> Manager:
        """Returns the package manager by the field `packageManager`, the lock file, or what the project runs."""
        files, field = self.files, _text(self.package, "packageManager")
        found = re.match(r"(npm|pnpm|yarn|bun)@(\d[\w.-]{0,40})", field, re.ASCII)
        name, version = found.groups() if found else (self._guess_manager(), "")
        locked = any(map(files.has, LOCKS[name]))
        if name == "pnpm":
            lock = files.read("pnpm-lock.yaml")
            frozen = "--frozen-lockfile" if locked else "--no-frozen-lockfile"
            return Manager(f"pnpm install {frozen}", name, f"pnpm@{version or _find_pnpm(lock)}")
        if name == "yarn":
            lock = files.read("yarn.lock")
            if version.startswith(("0.", "1.")) or (not version and "__metadata:" not in lock):
                return Manager(f"yarn install{' --frozen-lockfile' * locked}", name, f"yarn@{version or 1}")
            # Start commands find packages in node_modules, whichever way of linking the project uses elsewhere.
            install, linker = f"yarn install --{'' if locked else 'no-'}immutable", "YARN_NODE_LINKER=node-modules"
            return Manager(install, name, f"@yarnpkg/cli-dist@{version or 4}", linker)
        if name == "bun":
            return Manager(f"bun install{' --frozen-lockfile' * locked}", name, f"bun@{version or 1}")
        return Manager("npm ci" if locked else "npm install")

    def _guess_manager(self) -> str:
        locked = next((name for name, locks in LOCKS.items() if any(map(self.files.has, locks))), "")
        called = re.search(r"(?:^|[\s;&|])(pnpm|yarn|bun)x?\s", self.scripts.get("start", ""))
        if locked in ("", "npm") and called:
            return called[1]
        return locked or ("npm" if self.packages.keys().isdisjoint({"@types/bun", "bun-types"}) else "bun")


def _configurations(rule: NodeRule) -> list[str]:
    return [f"{name}.{suffix}" for name in rule.configurations for suffix in SUFFIXES]


def _recognize_node(project: _Node) -> Recognition | None:
    _require_workspace(project)
    rule, manager = next(filter(project.matches, NODE_RULES), None), project.manager
    if project.workspace and DELEGATES.search(project.scripts.get("build", "")):
        rule = None
    if project.has_server(rule):
        return _recognize_server(project, rule)
    if rule is None:
        if entry := project.find_entry():
            build = Build(manager.build(), start=manager.start(f"bun {entry}"))
            return Recognition("Bun", PACKAGE, build, project.name)
        return None
    if rule.problem:
        raise Unrecognizable(rule.problem)
    if rule.needs_start and "start" not in project.scripts:
        raise Unrecognizable(f"{rule.name} needs a `start` script in {PACKAGE}")
    command = project.build_with(rule)
    if not rule.output:
        return Recognition(rule.name, PACKAGE, Build(command, start=rule.start or project.start()), project.name)
    if "{project}" in rule.output:
        return Recognition(rule.name, PACKAGE, _build_angular(project, command), project.name)
    return Recognition(rule.name, PACKAGE, Build(command, _find_output(project, rule)), project.name)


def _recognize_server(project: _Node, rule: NodeRule | None) -> Recognition:
    """Returns how to build and start an app with a server of its own, whatever builds its pages."""
    name, command = "Node.js", project.manager.build()
    if rule and (not rule.output or "build" in project.scripts):
        name = rule.name if rule.needs_start else f"{rule.name} with a server of its own"
    if "build" in project.scripts:
        command = project.manager.build(project.manager.run("build"))
    elif rule and not rule.output:
        command = project.build_with(rule)
    return Recognition(name, PACKAGE, Build(command, start=project.start()), project.name)


def _require_workspace(project: _Node) -> None:
    """Raises Unrecognizable for a package that was published without the workspace around it."""
    if project.workspace or any(map(project.files.has, ("pnpm-workspace.yaml", ".yarnrc.yml"))):
        return
    for name, version in project.packages.items():
        if isinstance(version, str) and version.startswith(("workspace:", "file:..", "link:..", "portal:..")):
            raise Unrecognizable(
                f"{PACKAGE} requires {name} at {version}, which is outside of what you published. Publish the root of"
                f" the workspace. {_ask_for_package(project)}"
            )


def _require_tool(project: _Node) -> None:
    """Raises Unrecognizable for a project that has to be built by what is not known, if it has no page."""
    if project.files.has(PAGE):
        return
    if project.workspace:
        raise Unrecognizable(f"This is the root of a workspace ({project.workspace}). {_ask_for_package(project)}")
    if "build" in project.scripts:
        settings = write_settings(Build(project.manager.build(project.manager.run("build")), "dist"))
        raise Unrecognizable(
            f"{PACKAGE} has a `build` script, but the service does not know what it makes. Write it into capsule.toml,"
            f" for example: {settings}"
        )


def _ask_for_package(project: _Node) -> str:
    settings = write_settings(Build(project.manager.build_package("web"), "apps/web/dist"))
    return f"Write into its capsule.toml which package to build, for example: {settings}"


def _find_pnpm(lock: str) -> str:
    """Returns the version of pnpm that reads this format of its lock file."""
    found = re.search(r"^lockfileVersion:\s*['\"]?(\d+)", lock, re.MULTILINE)
    return {"5": "7", "6": "8"}.get(found[1] if found else "", "10")


def _find_output(project: _Node, rule: NodeRule) -> str:
    if "{folder}" in rule.output:
        return _find_documentation(project, rule)
    named = project.find(rule, f"(?:{rule.named}){FOLDER}") if rule.named else None
    root = project.find(rule, rf"\broot\s*:{FOLDER}") if rule.name == "Vite" else None
    start = root["folder"] if root and not (named and named["absolute"]) else ""
    output = posixpath.normpath(posixpath.join(start, named["folder"] if named else rule.output))
    return rule.output if output.startswith("..") else output


def _find_documentation(project: _Node, rule: NodeRule) -> str:
    """Returns the output in the folder that the command of VitePress or VuePress names."""
    command = re.compile(rf"\b{rule.build.split()[0]}(?:-\w+)? build(?: +(?:\./)?(\w[\w./-]*))?")
    commands = map(command.search, [project.read_script(rule), *project.scripts.values(), rule.build])
    folder = next(filter(None, commands))[1] or "."
    configurations = (project.files.read(f"{folder}/.vitepress/config.{suffix}") for suffix in SUFFIXES)
    texts = (COMMENT.sub("", text) for text in configurations)
    named = next(filter(None, (re.search(r"\boutDir\s*:\s*['\"`]([\w./-]+)", text) for text in texts)), None)
    return posixpath.normpath(f"{folder}/{named[1]}" if named else rule.output.format(folder=folder))


def _build_angular(project: _Node, command: str) -> Build:
    """Returns how Angular's first project, or the default one, is built and served."""
    if not project.files.has("angular.json"):
        return Build(command, f"dist/{project.name or 'app'}/browser")
    try:
        workspace = json.loads(project.files.read("angular.json"))
    except (ValueError, RecursionError) as error:
        raise Unrecognizable(f"angular.json is not valid JSON: {error}") from None
    projects = _table(workspace, "projects")
    name = _text(workspace, "defaultProject") or next(iter(projects), "app")
    targets = _table(projects, name)
    target = _table(targets, "architect", "build") or _table(targets, "targets", "build")
    options = _table(target, "options")
    path = options.get("outputPath")
    folders = path if isinstance(path, dict) else {"base": path}
    base = (_text(folders, "base") or f"dist/{name}").rstrip("/")
    if ":application" not in _text(target, "builder") and target:
        return Build(command, base)  # the builder of Angular 16 and older
    if options.get("outputMode", "server" if options.get("ssr") else "static") == "server":
        return Build(command, start=f"node {base}/{_text(folders, 'server') or 'server'}/server.mjs")
    browser = folders.get("browser")
    return Build(command, posixpath.join(base, browser if isinstance(browser, str) else "browser").rstrip("/"))


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
    """The files of a source in a folder. Follows no link, and does not leave the folder."""

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
        if ".." in folders:
            return None
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
    """Returns what is wrong with a source of which a folder is served as it is; None if something answers `/` there.

    The message names the pages further down that are nearest to the top. No link is followed.
    """
    folder = source / served
    if not folder.is_dir() or any(os.path.lexists(folder / name) for name in (PAGE, FALLBACK)):
        return None
    if any(map(_leads_from_the_top, SourceFolder(folder).read(REDIRECTS).splitlines())):
        return None
    top = "the top of what you published" if folder == source else f"the top of {served}"
    nearest = [*islice(_find_pages(source), NAMED_PAGES + 1)]
    pages = [path.relative_to(source).as_posix() for path in nearest[:NAMED_PAGES]]
    more = ["…"] if len(nearest) > NAMED_PAGES else []
    return f"There is no {PAGE} at {top}" + (f"; found: {', '.join(pages + more)}" if pages else "")


def _leads_from_the_top(line: str) -> bool:
    """Returns whether a line of `_redirects` is for `/`. Whether it leads to a page, the check of the release shows."""
    source, target, status = [*line.split(), "", "", ""][:3]
    return source in ("/", "/*") and bool(target) and status[:3] not in ("404", "410")


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
