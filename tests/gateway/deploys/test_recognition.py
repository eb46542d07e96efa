import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.accounts.records import Build
from gateway.deploys.manifest import parse_manifest
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
from tests.support.frameworks import FOLDER, NPM, PROJECTS, Project, own


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


def test_each_rule_has_a_project() -> None:
    rules = {rule.name for rule in (*NODE_RULES, *PYTHON_RULES)} | {"Node.js", "Bun", "Django", "static files"}
    assert {project.rule.removesuffix(" with a server of its own") for project in PROJECTS} == rules


def test_descriptions() -> None:
    vite = Recognition("Vite", "package.json", Build("npm ci", "dist"))
    node = Recognition("Node.js", "package.json", Build("npm ci", start="npm start"))
    assert vite.describe() == "Vite (package.json): npm ci, serving dist"
    assert (vite.summarize(), node.summarize()) == ("npm ci → dist", "npm ci → npm start")


def test_django_settings_may_fill_the_allowed_hosts_later(tmp_path: Path) -> None:
    """The project may build its pages with a tool of its own."""
    for more in ("ALLOWED_HOSTS += [HOST]", "if HOST:\n    ALLOWED_HOSTS.append(HOST)"):
        files = {**DJANGO, "shop/settings.py": f"ALLOWED_HOSTS = []\n{more}\n", "package.json": package("vite")}
        assert write(tmp_path, files).rule == "Django"


@pytest.mark.parametrize(
    ("options", "output", "start"),
    [
        ({"outputPath": "www/"}, "www/browser", None),
        ({"outputPath": {"base": "www", "browser": ""}}, "www", None),
        ({"builder": "@angular-devkit/build-angular:browser", "outputPath": "dist/old"}, "dist/old", None),
        ({"outputMode": "server", "ssr": {"entry": "src/server.ts"}}, "dist", "node dist/shop/server/server.mjs"),
        ({"ssr": {"entry": "server.ts"}, "prerender": True}, "dist", "node dist/shop/server/server.mjs"),
    ],
)
def test_angular(tmp_path: Path, options: dict[str, Any], output: str, start: str | None) -> None:
    builder = options.get("builder", "@angular/build:application")
    workspace = {"projects": {"shop": {"architect": {"build": {"builder": builder, "options": options}}}, "other": {}}}
    files = {"package.json": package("@angular/build"), "angular.json": json.dumps(workspace)}
    build = write(tmp_path, files).build
    assert (build.output, build.start) == (output, start)


PLUGIN, STATIC = "require('html-webpack-plugin')", "import a from '@sveltejs/adapter-static'"


@pytest.mark.parametrize(
    ("dependency", "script", "files", "output"),
    [
        ("vite", "vite build", {"vite.config.ts": "build: { outDir: 'build/web/' }"}, "build/web"),
        ("vite", "vite build", {"vite.config.ts": "build: { outDir: path.resolve(__dirname, 'out') }"}, "out"),
        ("vite", "tsc && vite build --outDir=public", {"vite.config.ts": "build: { outDir: 'build' }"}, "public"),
        ("vite", "vite build", {"vite.config.js": "root: 'src',\nbuild: { outDir: '../build' }"}, "build"),
        ("vite", "vite build", {"vite.config.js": "root: 'src'"}, "src/dist"),
        ("vite", "vite build", {"vite.config.js": "build: { outDir: '../../static' }"}, "dist"),
        ("vite", "vite build", {"vite.config.js": "// build: { outDir: 'build' }"}, "dist"),
        ("astro", "astro build", {"astro.config.mjs": "outDir: './build'"}, "build"),
        ("@11ty/eleventy", "eleventy", {".eleventy.js": "return { dir: { input: 'src', output: 'dist' } }"}, "dist"),
        ("@vue/cli-service", "vue-cli-service build", {"vue.config.js": "outputDir: 'docs'"}, "docs"),
        ("react-scripts", "BUILD_PATH='./dist' react-scripts build", {}, "dist"),
        ("@rsbuild/core", "rsbuild build", {"rsbuild.config.ts": "output: { distPath: 'build' }"}, "build"),
        ("webpack", "webpack", {"webpack.config.js": f"{PLUGIN}; path: path.resolve(__dirname, 'public')"}, "public"),
        ("@sveltejs/kit", "vite build", {"svelte.config.js": f"{STATIC}; a({{ pages: 'public' }})"}, "public"),
    ],
)
def test_an_output_of_the_project_s_own(
    tmp_path: Path, dependency: str, script: str, files: dict[str, str], output: str
) -> None:
    text = package(dependency, scripts={"build": script})
    assert write(tmp_path, {"package.json": text, **files}).build.output == output


# -- projects with a server of their own ---------------------------------------------------------------------

# Start scripts, by what they are.
TOOL_SERVERS = {
    "none": [""],
    "the tool itself": ["vite", "react-scripts start", "craco start", "docusaurus start", "ng serve", "ember serve"],
    "with options": ["vite --host 0.0.0.0 --port $PORT", "npx -y serve -s dist", "npx @11ty/eleventy --serve"],
    "in the background": ["PORT=3000 vite & ng serve"],
    "with variables": ["set PORT=3000&& vite", "NODE_OPTIONS='--max-old-space-size=4096 --trace' vite"],
    "behind cross-env": ["cross-env NODE_ENV=production npx vite preview", "cross-env-shell 'vite --port $PORT'"],
    "by its path": ["./node_modules/.bin/vite", "node --max-old-space-size=4096 node_modules/vite/bin/vite.js preview"],
    "by a package manager": ["pnpm vite", "pnpm exec vite", "bunx --bun vite", "bun --bun run vite"],
    "another script": ["npm run dev", "npm run dev -- --host", "yarn dev"],
}
OWN_SERVERS = {
    "a file": ["node server.js", "node dist/index.js", "node serve", "node ./vite.js", "scripts/serve"],
    "with variables": ["NODE_ENV=production node server.js", "cross-env NODE_ENV=production node server.js"],
    "after a tool": ["vite build && node server.js", "npm run build && npm run serve", "vite & node server.js"],
    "by another program": ["tsx watch src/server.ts", "bun run src/index.ts", "npx nodemon server.js"],
    "of a workspace": ["npm start -w api", "pnpm --filter api start", "yarn workspace api start"],
}
SCRIPTS = {"build": "vite build", "dev": "vite", "serve": "node server.js"}


def start_of_vite(tmp_path: Path, script: str) -> str | None:
    text = package("express", devDependencies={"vite": "*"}, scripts={**SCRIPTS, "start": script})
    found = write(tmp_path, {"package.json": text})
    assert found.rule == ("Vite with a server of its own" if found.build.start else "Vite")
    return found.build.start


def test_the_server_of_a_tool_is_not_started(tmp_path: Path) -> None:
    for script in itertools.chain(*TOOL_SERVERS.values()):
        assert start_of_vite(tmp_path, script) is None, script


def test_a_server_of_its_own_is_started(tmp_path: Path) -> None:
    started = "PATH=$PWD/.capsule/bin:$PATH {} run start"
    for script in itertools.chain(*OWN_SERVERS.values()):
        manager = next((name for name in ("pnpm", "yarn", "bun") if name in script), None)
        assert start_of_vite(tmp_path, script) == (started.format(manager) if manager else "npm start"), script


NUXT = "export default defineNuxtConfig({\n"
BUILT, ADAPTER_NODE = {"build": "x"}, {"svelte.config.js": "'@sveltejs/adapter-node'"}
SVELTEKIT = Build(NPM, start="node build")
ADONIS = Build(NPM, start="cd build && exec node bin/server.js")
NEXT = Build("npm install && npx next build", start="npm start")


@pytest.mark.parametrize(
    ("dependencies", "scripts", "files", "rule", "build"),
    [
        (("express", "vite"), {"start": "node s.js"}, {}, "Node.js", Build("npm install", start="npm start")),
        (("next",), {"start": "node s.js"}, {}, "Next.js with a server of its own", NEXT),
        (("@adonisjs/core", "vite"), BUILT | {"start": "node bin/server.js"}, {}, "AdonisJS", ADONIS),
        (("@sveltejs/kit",), BUILT | {"start": "node build"}, ADAPTER_NODE, "SvelteKit", SVELTEKIT),
    ],
)
def test_a_server_whatever_builds_its_pages(
    tmp_path: Path, dependencies: Any, scripts: Any, files: Any, rule: str, build: Build
) -> None:
    found = write(tmp_path, {"package.json": package(*dependencies, scripts=scripts), **files})
    assert found[:3] == (rule, "package.json", build)


def test_scripts_that_run_each_other(tmp_path: Path) -> None:
    each_other = {f"s{number}": " & ".join(f"npm run s{other}" for other in range(100)) for number in range(100)}
    chain = {f"s{number}": f"npm run s{number + 1}" for number in range(5_000)}
    for many in (each_other, chain):
        text = package("vite", scripts={"build": "x", **many, "start": "npm run s0"})
        assert write(tmp_path, {"package.json": text}).build.start == "npm start"


@pytest.mark.parametrize(
    ("dependency", "scripts", "files", "output"),
    [
        ("next", {}, {"next.config.ts": 'module.exports = { "output" : "export" }'}, "out"),
        ("next", {}, {"next.config.ts": "export default { output: 'standalone' }"}, None),
        ("next", {}, {"next.config.ts": "export default {\n  // output: 'export',\n}"}, None),
        ("nuxt", {"build": "nuxt generate"}, {}, ".output/public"),
        ("nuxt", {"build": "nuxt build"}, {"nuxt.config.ts": f"{NUXT}  ssr: false,\n}})"}, ".output/public"),
        ("nuxt", {}, {"nuxt.config.ts": "export default defineNuxtConfig({ ssr: false })"}, ".output/public"),
        ("nuxt", {}, {"nuxt.config.ts": f"{NUXT}  routeRules: {{\n    '/': {{\n      ssr: false }}}}}})"}, None),
        ("nuxt", {}, {"nuxt.config.ts": f"{NUXT}  routeRules: {{ '/': {{ ssr: false }} }} }})"}, None),
        ("@react-router/dev", {"start": "x"}, {"react-router.config.ts": "ssr: false"}, "build/client"),
        ("@remix-run/dev", {}, {"vite.config.ts": "remix({ ssr: false })"}, "build/client"),
        ("astro", {}, {"astro.config.mjs": "import node from '@astrojs/node'"}, None),
        ("astro", {}, {"astro.config.mjs": "// import node from '@astrojs/node'"}, "dist"),
        ("vitepress", {"build": "npm run x && exit", "x": "vitepress build ./www --base /"}, {}, "www/.vitepress/dist"),
        ("vitepress", {}, {}, "docs/.vitepress/dist"),
        ("vitepress", {}, {"docs/.vitepress/config.mts": "outDir: '../public'"}, "public"),
        ("vuepress", {"build": "vuepress-vite build src"}, {}, "src/.vuepress/dist"),
        ("storybook", {"build-storybook": "x"}, {}, "storybook-static"),
        ("storybook", {"build": "storybook build"}, {}, "storybook-static"),
        ("@angular/build", {"build": "ng build"}, {}, "dist/app/browser"),
    ],
)
def test_what_decides_between_a_server_and_files(
    tmp_path: Path, dependency: str, scripts: dict[str, str], files: dict[str, str], output: str | None
) -> None:
    build = write(tmp_path, {"package.json": package(dependency, "vite", scripts=scripts), **files}).build
    assert (build.output if not build.start else None) == output


@pytest.mark.parametrize(
    ("dependencies", "rule", "build"),
    [
        (
            ("@sveltejs/kit", "@sveltejs/adapter-node"),
            "SvelteKit",
            Build("npm install && npx vite build", start="node build"),
        ),
        (("@sveltejs/kit", "@sveltejs/adapter-static"), "SvelteKit", Build("npm install && npx vite build", "build")),
        (
            ("astro", "@astrojs/node"),
            "Astro",
            Build("npm install && npx astro build", start="node dist/server/entry.mjs"),
        ),
    ],
)
def test_an_adapter_without_a_configuration(
    tmp_path: Path, dependencies: tuple[str, ...], rule: str, build: Build
) -> None:
    found = write(tmp_path, {"package.json": package(*dependencies)})
    assert (found.rule, found.build) == (rule, build)


def test_nuxt_makes_files_although_its_script_builds_a_server(tmp_path: Path) -> None:
    text = package("nuxt", scripts={"build": "nuxt build"})
    found = write(tmp_path, {"package.json": text, "nuxt.config.ts": "export default { ssr: false }"})
    assert found.build == Build("npm install && npx nuxt generate", ".output/public")


# -- workspaces ----------------------------------------------------------------------------------------------

TURBO = {"scripts": {"build": "turbo run build"}, "packageManager": "pnpm@9.0.0"}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"package.json": package("vite", dependencies={"vite": "1", "@acme/ui": "workspace:*"})},
            'requires @acme/ui at workspace:., which is outside .* Publish the root .*npm run build -w web"',
        ),
        ({"package.json": package(dependencies={"ui": "file:../ui"})}, r"requires ui at file:\.\./ui"),
        (
            {"package.json": package("turbo", **TURBO), "pnpm-workspace.yaml": "packages:\n  - apps/*"},
            r"the root of a workspace \(pnpm-workspace.yaml\).*pnpm --filter web run build",
        ),
        ({"package.json": package(scripts={"build": "gulp"})}, "has a `build` script, .*npm install && npm run"),
    ],
)
def test_which_part_to_build(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    with pytest.raises(Unrecognizable, match=reason) as raised:
        write(tmp_path, files)
    read_settings(str(raised.value))


def read_settings(message: str) -> Build:
    """Returns the build that a message says to write."""
    line = message[message.index("build = {") : message.rindex("}") + 1]
    build = parse_manifest(line.encode()).record_build
    assert build
    return build


def test_the_root_of_a_workspace_may_be_the_app(tmp_path: Path) -> None:
    for more in (
        {"package.json": package("vite", dependencies={"vite": "1", "ui": "workspace:*"}, workspaces=["ui"])},
        {"package.json": package("vite", scripts={"build": "x"}, workspaces=["ui"])},
        {"package.json": package("vite", scripts={"build": "x"}), "pnpm-workspace.yaml": "onlyBuiltDependencies: []"},
    ):
        assert write(tmp_path, more).rule == "Vite"


# -- what is not built ---------------------------------------------------------------------------------------

LARAVEL = {"package.json": package("laravel-vite-plugin", "vite", scripts={"build": "vite build"})}


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("Laravel", {**LARAVEL, "composer.json": "{}", "artisan": "", "index.html": ""}),
        ("Rails", {"Gemfile": "", "config/application.rb": "", "package.json": package("vite")}),
        ("Hugo", {"config.toml": 'title = "x"\nbaseURL = "/"'}),
        ("Zola", {"config.toml": 'base_url = "/"'}),
        ("Jekyll", {"_config.yml": "", "index.html": "---\nlayout: home\n---"}),
        ("Go", {"go.mod": "", "main.go": "", "index.html": ""}),
        ("Streamlit", {"requirements.txt": "pandas\nStreamlit==1.2\n"}),
        ("Python", {"requirements.txt": "numpy\nstreamlit-extras\n"}),
        ("Procfile", {"Procfile": "web: ./run"}),
        ("Docker", {"Dockerfile": "FROM x", "site/index.html": ""}),
    ],
)
def test_what_is_not_built_is_named(tmp_path: Path, name: str, files: dict[str, str]) -> None:
    with pytest.raises(Unrecognizable, match=rf"Found {name} \(") as raised:
        write(tmp_path, files)
    build = read_settings(str(raised.value))
    assert build.start or f"publish the folder {build.output} that you have built" in str(raised.value)


def test_a_dockerfile_does_not_hide_what_is_built(tmp_path: Path) -> None:
    files = {"Dockerfile": "", "Procfile": "", "Gemfile": "", "mkdocs.yml": "", "package.json": package("vite")}
    assert write(tmp_path, files).rule == "Vite"
    (tmp_path / "package.json").unlink()
    assert write(tmp_path, {"requirements.txt": "flask", "app.py": "app = 1"}).rule == "Flask"


# -- package managers ----------------------------------------------------------------------------------------

LINKER = "export YARN_NODE_LINKER=node-modules"
PNPM, YARN = "pnpm install {}-frozen-lockfile && pnpm run build", "yarn install{} && yarn run build"
FROZEN, UNFROZEN = PNPM.format("-"), PNPM.format("--no")
LOCKS = {"pnpm-lock.yaml": "lockfileVersion: '6.0'", "package-lock.json": "{}"}
YARN_4 = f"{own('@yarnpkg/cli-dist@4')} && {LINKER} && {YARN.format(' --immutable')}"
YARN_3 = f"{own('@yarnpkg/cli-dist@3.6.4')} && {LINKER} && {YARN.format(' --no-immutable')}"


@pytest.mark.parametrize(
    ("manager", "locks", "command"),
    [
        ("", {}, "npm install && npm run build"),
        ("", {"pnpm-lock.yaml": "lockfileVersion: '9.0'"}, f"{own('pnpm@10')} && {FROZEN}"),
        ("pnpm@9.1.0+sha512.abc", LOCKS, f"{own('pnpm@9.1.0')} && {FROZEN}"),
        ("", {"yarn.lock": "# yarn lockfile v1"}, f"{own('yarn@1')} && {YARN.format(' --frozen-lockfile')}"),
        ("", {"yarn.lock": "__metadata:\n  version: 8"}, YARN_4),
        ("yarn@3.6.4", {}, YARN_3),
        ("", {"bun.lockb": ""}, f"{own('bun@1')} && bun install --frozen-lockfile && bun run build"),
        ("", {"START": "PORT=1 pnpm x"}, f"{own('pnpm@10')} && {UNFROZEN}"),
        ("", {"START": "bun x", "yarn.lock": ""}, f"{own('yarn@1')} && {YARN.format(' --frozen-lockfile')}"),
        ("", {"pnpm-lock.yaml": ""}, f"{own('pnpm@10')} && {FROZEN}"),
    ],
)
def test_the_package_manager(tmp_path: Path, manager: str, locks: dict[str, str], command: str) -> None:
    scripts = {"build": "vite build", "start": locks.pop("START", "vite")}
    text = package("vite", packageManager=manager, scripts=scripts)
    assert write(tmp_path, {"package.json": text, **locks}).build.command == command


SYNC = (
    ".venv/bin/pip install uv && "
    ".venv/bin/uv sync --frozen --inexact --no-dev --no-python-downloads --python .venv/bin/python"
)
DEPENDENCIES = ".venv/bin/pip install uv && .venv/bin/uv pip install --python .venv/bin/python -r pyproject.toml"
REQUIREMENTS, FASTAPI = ".venv/bin/pip install -r requirements.txt", "[project]\ndependencies = ['fastapi>1']"
PACKAGES = "[project]\ndependencies = ['fastapi', 'uvicorn']"
POETRY = (
    "python3 -m venv ~/poetry && ~/poetry/bin/pip install poetry && "
    "POETRY_VIRTUALENVS_IN_PROJECT=true ~/poetry/bin/poetry install --only main --no-root"
)


@pytest.mark.parametrize(
    ("files", "install"),
    [
        ({"requirements.txt": "fastapi\nuvicorn\n"}, REQUIREMENTS),
        ({"requirements.txt": "FastAPI[standard]==1 # x\n-r y\n"}, f"{REQUIREMENTS} && UVICORN"),
        ({"requirements.txt": "uvicorn\n", "pyproject.toml": FASTAPI, "uv.lock": ""}, SYNC),
        ({"pyproject.toml": f"{PACKAGES}\n[build-system]\nbuild-backend = 'poetry.core.masonry.api'"}, POETRY),
        ({"pyproject.toml": PACKAGES}, DEPENDENCIES),
        ({"pyproject.toml": f"{PACKAGES}\n[build-system]\nrequires = ['hatchling']"}, ".venv/bin/pip install ."),
    ],
)
def test_how_python_packages_are_installed(tmp_path: Path, files: dict[str, str], install: str) -> None:
    install = install.replace("UVICORN", ".venv/bin/pip install uvicorn")
    build = write(tmp_path, {**files, "main.py": "app = 1\n"}).build
    assert build.command == f"python3 -m venv .venv && {install}"


@pytest.mark.parametrize(
    ("files", "app"),
    [
        ({"main.py": "app: FastAPI = FastAPI()"}, "main:app"),
        ({"main.py": "if app == 1: ...\nx.app = 2\n    app = 3", "wsgi.py": "app=1"}, "wsgi:app"),
        ({"app/main.py": "def create_app(): ..."}, "--factory app.main:create_app"),
        ({"main.py": "async def create_app(): ...", "app.py": "app = 1"}, "app:app"),
    ],
)
def test_where_a_python_app_is_defined(tmp_path: Path, files: dict[str, str], app: str) -> None:
    start = write(tmp_path, {"requirements.txt": "starlette", **files}).build.start
    assert start == f".venv/bin/python -m uvicorn {app} --host $HOST --port $PORT"


SVELTE, VERCEL = package("@sveltejs/kit", "@sveltejs/adapter-node"), "import vercel from '@astrojs/vercel'"
ADAPTER = r"use @sveltejs/adapter-node .* or @sveltejs/adapter-static"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"package.json": "{"}, "package.json is not valid JSON"),
        ({"pyproject.toml": "["}, "pyproject.toml is not valid TOML"),
        ({"package.json": package("@angular/build"), "angular.json": "{"}, "angular.json is not valid JSON"),
        ({"package.json": package("@react-router/dev")}, r"needs a `start` script in package\.json"),
        ({"package.json": SVELTE, "svelte.config.js": "'@sveltejs/adapter-auto'"}, ADAPTER),
        ({"package.json": package("astro"), "astro.config.mjs": VERCEL}, "use @astrojs/node for a server"),
        ({"requirements.txt": "flask", "server.py": "app = 1"}, "no app or create_app is defined in main.py, app.py"),
        ({**DJANGO, "shop/settings.py": "#\nALLOWED_HOSTS = []\n"}, "ALLOWED_HOSTS of shop.settings is empty"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    with pytest.raises(Unrecognizable, match=reason):
        write(tmp_path, files)


@pytest.mark.parametrize(
    "files",
    [
        {"index.html": "x", "package.json": package("prettier")},
        {"index.html": "x", "requirements.txt": "numpy\n", "Dockerfile": "", "Procfile": "", "_config.yml": ""},
        {"index.html": "x", "package.json": package(scripts={"start": "npm run dev", "dev": "npx serve ."})},
        {},
    ],
)
def test_all_else_is_static(tmp_path: Path, files: dict[str, str]) -> None:
    assert write(tmp_path, files)[:3] == ("static files", "", Build(output="."))


# -- names, folders and pages --------------------------------------------------------------------------------


def test_labels(tmp_path: Path) -> None:
    names = {"My Site": "my-site", "a__b--c": "a-b-c", "-x-": "x", "日本": "", "shop-preview": "shop"}
    for name, label in {**names, "a" * 62 + "-b": "a" * 62}.items():
        assert make_label(name) == label
    assert write(tmp_path, {"package.json": package(name="@me/My_App")}).name == "my-app", "without its scope"


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    write(tmp_path / "outside", {"package.json": package("vite")})
    for name in ("links", "pipes", "folders"):
        (tmp_path / name).mkdir()
    (tmp_path / "links" / "package.json").symlink_to("../outside/package.json")
    (tmp_path / "links" / "inner").symlink_to("../outside")
    os.mkfifo(tmp_path / "pipes" / "package.json")
    (tmp_path / "folders" / "package.json").mkdir()
    assert SourceFolder(tmp_path).has("outside/package.json")
    for name in ("links", "pipes", "folders"):
        assert not SourceFolder(tmp_path / name).has("package.json")
        assert SourceFolder(tmp_path / name).read("package.json") == ""
    for name in ("inner/package.json", "../outside/package.json"):
        assert not SourceFolder(tmp_path / "links").has(name)


def test_a_missing_page(tmp_path: Path) -> None:
    missing = "There is no index.html at the top of what you published"
    assert explain_missing_page(tmp_path) == missing
    write(tmp_path, {"b/c/index.html": "", "x.html": ""})
    (tmp_path / "link").symlink_to("b/c")
    assert explain_missing_page(tmp_path) == f"{missing}; found: b/c/index.html"
    assert explain_missing_page(tmp_path, "b").startswith("There is no index.html at the top of b; found: ")
    assert explain_missing_page(tmp_path, "b/c") is None
    redirects = tmp_path / "_redirects"
    for line, answers in {
        "  /*  /app.html 200 # all": True,
        "/": False,
        "/ /lost.html 404!": False,
    }.items():
        redirects.write_text(f"/old /new\n{line}")
        assert (line, explain_missing_page(tmp_path) is None) == (line, answers)
    redirects.unlink()
    write(tmp_path, {"index.html": ""})
    assert explain_missing_page(tmp_path) is None


def test_files_that_are_made_to_take_long(tmp_path: Path) -> None:
    """Each of these would take minutes if a pattern began again at every character."""
    many = 300_000
    packages = {"next.config.js": "/*" * many, "next.config.ts": "output" * many, "next.config.mjs": "//" * many}
    packages["package.json"] = package("next", packageManager=f"pnpm@{'1' * many}")
    assert write(tmp_path, packages).build.start
    assert len(recognize(SourceFolder(tmp_path)).build.command) < 1_000
    django = {"requirements.txt": "x" * many, "manage.py": f"django 'DJANGO_SETTINGS_MODULE', '{'a.' * many}b'"}
    with pytest.raises(Unrecognizable, match="does not set"):
        write(tmp_path, django)
    (tmp_path / "manage.py").unlink()
    (tmp_path / "package.json").unlink()
    (tmp_path / "config.toml").write_text("\n" * many + " \t'" * many)
    calls = 30_000
    scripts = {"build": "x", "start": "npm run a & " * calls, "a": "npm run b & " * calls, "b": "vite"}
    assert write(tmp_path, {"package.json": package("vite", scripts=scripts)}).build.output == "dist"
    (tmp_path / "package.json").unlink()
    entries = {"main.py": "app\n" * many, "app.py": "app" + "\n" * many, "wsgi.py": f"app:{' ' * many}"}
    with pytest.raises(Unrecognizable, match="no app or create_app"):
        write(tmp_path, {"requirements.txt": "flask", **entries})
