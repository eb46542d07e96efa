import codecs
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.accounts.records import Build
from gateway.deploys.recognition import (
    NODE_RULES,
    PYTHON_RULES,
    Recognition,
    SourceFolder,
    Unrecognizable,
    explain_missing_page,
    make_label,
    recognize,
)
from tests.support.frameworks import FOLDER, PROJECTS, Project


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> Recognition:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return recognize(SourceFolder(folder))


def package(*dependencies: str, **more: Any) -> str:
    return json.dumps({"dependencies": dict.fromkeys(dependencies, "*"), **more})


DJANGO = {
    "requirements.txt": "django",
    "manage.py": "import django, os\nos.environ.setdefault('DJANGO_SETTINGS_MODULE', 'shop.settings')",
}


# -- rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.folder)
def test_each_project(project: Project) -> None:
    found = recognize(SourceFolder(FOLDER / project.folder))
    build = Build(project.command, start=project.start) if project.start else Build(project.command, project.output)
    assert found._replace(name="") == Recognition(project.rule, project.file, build)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_files_as_powershell_writes_them(tmp_path: Path, encoding: str) -> None:
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    for name, text in {"requirements.txt": "flask\r\ngunicorn\r\n", "app.py": "app = Flask(__name__)\r\n"}.items():
        (tmp_path / name).write_bytes(mark + text.encode(encoding))
    assert recognize(SourceFolder(tmp_path)).describe().startswith("Flask (requirements.txt): ")
    (tmp_path / "package.json").write_bytes(mark + package("vite").encode(encoding))
    assert recognize(SourceFolder(tmp_path)).rule == "Vite"


def test_each_rule_has_a_project() -> None:
    rules = {rule.name for rule in (*NODE_RULES, *PYTHON_RULES)} | {"Node.js", "Django", "static files"}
    assert {project.rule for project in PROJECTS} == rules


@pytest.mark.parametrize(
    ("rule", "file", "build", "line", "summary"),
    [
        (
            "Vite",
            "package.json",
            Build("npm ci && npm run build", "dist"),
            "Vite (package.json): npm ci && npm run build, serving dist",
            "npm ci && npm run build → dist",
        ),
        (
            "Node.js",
            "package.json",
            Build("npm ci", start="npm start"),
            "Node.js (package.json): npm ci, starting npm start",
            "npm ci → npm start",
        ),
        (
            "static files",
            "",
            Build(output="."),
            "static files: serving the folder as it is",
            "serve the folder as it is",
        ),
    ],
)
def test_descriptions(rule: str, file: str, build: Build, line: str, summary: str) -> None:
    found = Recognition(rule, file, build)
    assert (found.describe(), found.summarize()) == (line, summary)


@pytest.mark.parametrize(
    ("dependencies", "rule"),
    [
        (("vite", "@react-router/dev"), "React Router"),
        (("vite", "@remix-run/serve"), "Remix"),
        (("vite", "@11ty/eleventy"), "Eleventy"),
        (("vite", "astro"), "Astro"),
        (("vite", "react-router", "express"), "Vite"),
        (("express", "vitest"), "Node.js"),
    ],
)
def test_a_tool_that_is_built_on_another_one_comes_first(
    folder: Path, dependencies: tuple[str, ...], rule: str
) -> None:
    text = package(scripts={"build": "x", "start": "y"}, devDependencies=dict.fromkeys(dependencies, "*"))
    assert write(folder, {"package.json": text}).rule == rule


@pytest.mark.parametrize("more", ["ALLOWED_HOSTS += [HOST]", "if HOST:\n    ALLOWED_HOSTS.append(HOST)"])
def test_django_settings_may_fill_the_allowed_hosts_later(folder: Path, more: str) -> None:
    files = {**DJANGO, "shop/settings.py": f"ALLOWED_HOSTS = []\n{more}\n"}
    assert write(folder, files).rule == "Django"


def test_a_django_project_may_build_its_pages_with_vite(folder: Path) -> None:
    django = {
        name: text
        for name, text in next(each for each in PROJECTS if each.folder == "django").files.items()
        if name != "requirements.txt"
    }
    project = '[project]\nname = "The Shop"\ndependencies = ["django"]\n'
    found = write(folder, {**django, "package.json": package("vite"), "pyproject.toml": project})
    assert (found.rule, found.name) == ("Django", "the-shop")


@pytest.mark.parametrize("adapter", ["auto", "vercel"])
@pytest.mark.parametrize("file", ["svelte.config.js", "vite.config.ts"])
def test_sveltekit_needs_an_adapter(folder: Path, adapter: str, file: str) -> None:
    files = {"package.json": package("@sveltejs/kit", "@sveltejs/adapter-node"), file: f"'@sveltejs/adapter-{adapter}'"}
    with pytest.raises(Unrecognizable, match=r"use @sveltejs/adapter-node .* or @sveltejs/adapter-static"):
        write(folder, files)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("const nextConfig = {\n  output: 'export',\n}", "out"),
        ('module.exports = { "output" : "export" }', "out"),
        ("export default { url: 'https://x', output: `export` }", "out"),
        ("export default { output: 'standalone' }", None),
        ("export default {\n  // output: 'export',\n}", None),
        ("/* output: 'export' */ export default {}", None),
        ("export default { outputFileTracing: 'export' }", None),
    ],
)
def test_next_with_and_without_an_export(folder: Path, text: str, output: str | None) -> None:
    build = write(folder, {"package.json": package("next"), "next.config.ts": text}).build
    assert build.output == (output or "dist")
    assert bool(build.start) == (output is None)


@pytest.mark.parametrize("rule", ["@react-router/dev", "@remix-run/dev"])
def test_a_server_without_a_start_script(folder: Path, rule: str) -> None:
    with pytest.raises(Unrecognizable, match=r"needs a `start` script in package\.json"):
        write(folder, {"package.json": package(rule)})


@pytest.mark.parametrize(
    ("target", "output"),
    [
        ({"builder": "@angular/build:application"}, "dist/shop/browser"),
        ({"builder": "@angular/build:application", "options": {"outputPath": "www/"}}, "www/browser"),
        (
            {"builder": "@angular/build:application", "options": {"outputPath": {"base": "www", "browser": ""}}},
            "www",
        ),
        (
            {"builder": "@angular-devkit/build-angular:browser", "options": {"outputPath": "dist/old"}},
            "dist/old",
        ),
    ],
)
@pytest.mark.parametrize("targets", ["architect", "targets"])
def test_the_output_of_angular(folder: Path, target: dict[str, Any], output: str, targets: str) -> None:
    workspace = {"projects": {"shop": {targets: {"build": target}}, "other": {}}}
    files = {"package.json": package("@angular/build"), "angular.json": json.dumps(workspace)}
    assert write(folder, files).build.output == output


# -- package managers ----------------------------------------------------------------------------------------

BERRY = "YARN_NODE_LINKER=node-modules npx -y -p @yarnpkg/cli-dist"


@pytest.mark.parametrize(
    ("manager", "locks", "command"),
    [
        ("", {}, "npm install && npm run build"),
        ("", {"package-lock.json": "{}"}, "npm ci && npm run build"),
        ("", {"npm-shrinkwrap.json": "{}"}, "npm ci && npm run build"),
        ("npm@10.2.0", {"yarn.lock": ""}, "npm install && npm run build"),
        (
            "",
            {"pnpm-lock.yaml": "lockfileVersion: '9.0'"},
            "npx -y -p pnpm@10 -c 'pnpm install --frozen-lockfile && pnpm run build'",
        ),
        (
            "",
            {"pnpm-lock.yaml": "lockfileVersion: 5.4"},
            "npx -y -p pnpm@7 -c 'pnpm install --frozen-lockfile && pnpm run build'",
        ),
        (
            "pnpm@9.1.0+sha512.abc",
            {"pnpm-lock.yaml": "lockfileVersion: '6.0'", "package-lock.json": "{}"},
            "npx -y -p pnpm@9.1.0 -c 'pnpm install --frozen-lockfile && pnpm run build'",
        ),
        ("pnpm@10.0.0", {}, "npx -y -p pnpm@10.0.0 -c 'pnpm install --no-frozen-lockfile && pnpm run build'"),
        (
            "",
            {"yarn.lock": "# yarn lockfile v1"},
            "npx -y -p yarn@1 -c 'yarn install --frozen-lockfile && yarn run build'",
        ),
        (
            "",
            {"yarn.lock": "__metadata:\n  version: 8"},
            f"{BERRY}@4 -c 'yarn install --immutable && yarn run build'",
        ),
        (
            "yarn@3.6.4",
            {},
            f"{BERRY}@3.6.4 -c 'yarn install --no-immutable && yarn run build'",
        ),
        ("yarn@1.22.22", {}, "npx -y -p yarn@1.22.22 -c 'yarn install && yarn run build'"),
        ("", {"bun.lock": "{}"}, "npx -y -p bun@1 -c 'bun install --frozen-lockfile && bun run build'"),
        ("", {"bun.lockb": ""}, "npx -y -p bun@1 -c 'bun install --frozen-lockfile && bun run build'"),
        ("pnpm@1;rm -r x", {}, "npx -y -p pnpm@1 -c 'pnpm install --no-frozen-lockfile && pnpm run build'"),
        ("cargo@1", {}, "npm install && npm run build"),
    ],
)
def test_the_package_manager(folder: Path, manager: str, locks: dict[str, str], command: str) -> None:
    text = package("vite", packageManager=manager, scripts={"build": "vite build"})
    assert write(folder, {"package.json": text, **locks}).build.command == command


SYNC = (
    ".venv/bin/pip install uv && "
    ".venv/bin/uv sync --frozen --inexact --no-dev --no-python-downloads --python .venv/bin/python"
)
DEPENDENCIES = ".venv/bin/pip install uv && .venv/bin/uv pip install --python .venv/bin/python -r pyproject.toml"
PACKAGES = "[project]\ndependencies = ['fastapi', 'uvicorn']"
POETRY = (
    "python3 -m venv ~/poetry && ~/poetry/bin/pip install poetry && "
    "POETRY_VIRTUALENVS_IN_PROJECT=true ~/poetry/bin/poetry install --only main --no-root"
)


@pytest.mark.parametrize(
    ("files", "install"),
    [
        ({"requirements.txt": "fastapi\nuvicorn\n"}, ".venv/bin/pip install -r requirements.txt"),
        (
            {"requirements.txt": "FastAPI[standard]==1 # x\n-r y\n"},
            ".venv/bin/pip install -r requirements.txt && UVICORN",
        ),
        (
            {
                "requirements.txt": "uvicorn\n",
                "pyproject.toml": "[project]\ndependencies = ['fastapi>1']",
                "uv.lock": "",
            },
            SYNC,
        ),
        ({"pyproject.toml": "[project]\ndependencies = ['fastapi']", "uv.lock": ""}, f"{SYNC} && UVICORN"),
        (
            {
                "pyproject.toml": "[tool.poetry.dependencies]\npython = '^3.11'\nfastapi = '*'\nuvicorn = '*'",
                "poetry.lock": "",
            },
            POETRY,
        ),
        ({"pyproject.toml": "[tool.poetry.dependencies]\nfastapi = '*'\nuvicorn = '*'"}, POETRY),
        ({"pyproject.toml": f"{PACKAGES}\n[build-system]\nbuild-backend = 'poetry.core.masonry.api'"}, POETRY),
        ({"pyproject.toml": PACKAGES}, DEPENDENCIES),
        ({"pyproject.toml": f"{PACKAGES}\n[build-system]\nrequires = ['hatchling']"}, ".venv/bin/pip install ."),
    ],
)
def test_how_python_packages_are_installed(folder: Path, files: dict[str, str], install: str) -> None:
    install = install.replace("UVICORN", ".venv/bin/pip install uvicorn")
    build = write(folder, {**files, "main.py": "app = 1\n"}).build
    assert build.command == f"python3 -m venv .venv && {install}"


@pytest.mark.parametrize(
    ("files", "app"),
    [
        ({"main.py": "app: FastAPI = FastAPI()"}, "main:app"),
        ({"app.py": "import x\napp = x.make()"}, "app:app"),
        ({"main.py": "if app == 1: ...\nx.app = 2\n    app = 3", "wsgi.py": "app=1"}, "wsgi:app"),
        ({"app/main.py": "def create_app(): ..."}, "--factory app.main:create_app"),
        ({"main.py": "async def create_app(): ...", "app.py": "app = 1"}, "app:app"),
    ],
)
def test_where_a_python_app_is_defined(folder: Path, files: dict[str, str], app: str) -> None:
    start = write(folder, {"requirements.txt": "starlette", **files}).build.start
    assert start == f".venv/bin/python -m uvicorn {app} --host $HOST --port $PORT"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"package.json": "{"}, "package.json is not valid JSON"),
        ({"package.json": "[" * 100_000}, "package.json is not valid JSON"),
        ({"pyproject.toml": "["}, "pyproject.toml is not valid TOML"),
        ({"package.json": package("@angular/build")}, "angular.json is missing"),
        ({"requirements.txt": "flask", "server.py": "app = 1"}, "no app or create_app is defined in main.py, app.py"),
        ({"manage.py": "import django"}, "there is no requirements.txt or pyproject.toml"),
        ({"manage.py": "import django", "requirements.txt": "django"}, "does not set DJANGO_SETTINGS_MODULE"),
        (
            {**DJANGO, "shop/settings.py": "# ALLOWED_HOSTS\nALLOWED_HOSTS = []\n"},
            "ALLOWED_HOSTS of shop.settings is empty",
        ),
    ],
)
def test_what_is_missing_is_named(folder: Path, files: dict[str, str], reason: str) -> None:
    with pytest.raises(Unrecognizable, match=reason):
        write(folder, files)


@pytest.mark.parametrize(
    "files",
    [
        {"index.html": "x", "package.json": package("prettier")},
        {"package.json": "[]"},
        {"package.json": '{"dependencies": [], "scripts": {"start": 1}, "name": {}}'},
        {"requirements.txt": "numpy\n"},
        {"manage.py": "print()"},
        {},
    ],
)
def test_all_else_is_static(folder: Path, files: dict[str, str]) -> None:
    assert write(folder, files)[:3] == ("static files", "", Build(output="."))


# -- names, folders and pages --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("My Site", "my-site"),
        ("a__b--c", "a-b-c"),
        ("-x-", "x"),
        ("ünder", "nder"),
        ("日本", ""),
        ("shop-preview", "shop"),
        ("a" * 62 + "-b", "a" * 62),
    ],
)
def test_labels(name: str, label: str) -> None:
    assert make_label(name) == label


def test_the_name_of_a_package_without_its_scope(folder: Path) -> None:
    assert write(folder, {"package.json": package(name="@me/My_App")}).name == "my-app"


def test_no_link_is_followed(folder: Path) -> None:
    (folder / "outside").mkdir()
    write(folder / "outside", {"package.json": package("vite")})
    for name in ("links", "pipes", "folders"):
        (folder / name).mkdir()
    (folder / "links" / "package.json").symlink_to("../outside/package.json")
    (folder / "links" / "inner").symlink_to("../outside")
    os.mkfifo(folder / "pipes" / "package.json")
    (folder / "folders" / "package.json").mkdir()
    assert SourceFolder(folder).has("outside/package.json")
    for name in ("links", "pipes", "folders"):
        assert not SourceFolder(folder / name).has("package.json")
        assert SourceFolder(folder / name).read("package.json") == ""
    assert not SourceFolder(folder / "links").has("inner/package.json")


def test_a_missing_page(folder: Path) -> None:
    missing = "There is no index.html at the top of what you published"
    assert explain_missing_page(folder) == missing
    write(folder, {"b/c/index.html": "", "x.html": ""})
    (folder / "link").symlink_to("b/c")
    assert explain_missing_page(folder) == f"{missing}; found: b/c/index.html"
    write(folder, {f"{name}/index.html": "" for name in "zya"})
    assert explain_missing_page(folder) == f"{missing}; found: a/index.html, y/index.html, z/index.html, …"
    assert explain_missing_page(folder, "b").startswith("There is no index.html at the top of b; found: ")
    assert explain_missing_page(folder, "b/c") is None
    assert explain_missing_page(folder, "gone") is None, "the build says so"
    write(folder, {"index.html": ""})
    assert explain_missing_page(folder) is None


def test_files_that_are_made_to_take_long(folder: Path) -> None:
    """Each of these would take minutes if a pattern began again at every character."""
    many = 300_000
    packages = {"next.config.js": "/*" * many, "next.config.ts": "output" * many, "next.config.mjs": "//" * many}
    assert write(folder, {"package.json": package("next", packageManager=f"pnpm@{'1' * many}"), **packages}).build.start
    assert len(recognize(SourceFolder(folder)).build.command) < 1_000
    django = {"requirements.txt": "x" * many, "manage.py": f"django 'DJANGO_SETTINGS_MODULE', '{'a.' * many}b'"}
    with pytest.raises(Unrecognizable, match="does not set"):
        write(folder, django)
    (folder / "manage.py").unlink()
    (folder / "package.json").unlink()
    entries = {"main.py": "app\n" * many, "app.py": "app" + "\n" * many, "wsgi.py": f"app:{' ' * many}"}
    with pytest.raises(Unrecognizable, match="no app or create_app"):
        write(folder, {"requirements.txt": "flask", **entries})


def test_pages_in_folders_that_are_very_deep(folder: Path) -> None:
    at = os.open(folder, os.O_RDONLY)
    for _ in range(3_000):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    fault = explain_missing_page(folder)
    subprocess.run(["rm", "-rf", folder / "d"], check=True)
    assert fault == "There is no index.html at the top of what you published"
