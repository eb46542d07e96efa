"""The small projects in `tests/fixtures/frameworks`, one for each rule by which sources are recognized."""

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "fixtures" / "frameworks"
TEXT = "Hello from the page"  # that each project serves

NPM = "npm install && npm run build"
PYTHON = ".venv/bin/python"
PIP = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt"
UVICORN = f"{PYTHON} -m uvicorn {{}} --host $HOST --port $PORT"
GUNICORN = f"{PYTHON} -m gunicorn --bind $HOST:$PORT"


MANAGER = "PATH=$PWD/.capsule/bin:$PATH"


def own(package: str) -> str:
    """Returns the beginning of a build with this package manager."""
    return f"npm install -g --prefix .capsule {package} && {MANAGER}"


class Project(NamedTuple):
    folder: str
    rule: str
    command: str
    output: str = ""
    start: str = ""
    file: str = "package.json"

    @property
    def files(self) -> dict[str, str]:
        """The texts by path."""
        top = FOLDER / self.folder
        return {path.relative_to(top).as_posix(): path.read_text() for path in top.rglob("*") if path.is_file()}


PROJECTS = [
    Project("vite", "Vite", NPM, "dist"),
    Project("vite-express", "Vite with a server of its own", NPM, start="npm start"),
    Project("vite-without-script", "Vite", "npm install && npx vite build", "dist"),
    Project("astro", "Astro", NPM, "dist"),
    Project("astro-node", "Astro", NPM, start="node dist/server/entry.mjs"),
    Project("docusaurus", "Docusaurus", NPM, "build"),
    Project("vitepress", "VitePress", "npm install && npm run docs:build", "docs/.vitepress/dist"),
    Project("vuepress", "VuePress", "npm install && npm run docs:build", "docs/.vuepress/dist"),
    Project("hexo", "Hexo", NPM, "public"),
    Project("eleventy", "Eleventy", "npm install && npx eleventy", "_site"),
    Project("gatsby", "Gatsby", NPM, "public"),
    Project("angular", "Angular", NPM, "dist/shop/browser"),
    Project("vue-cli", "Vue CLI", NPM, "dist"),
    Project("create-react-app", "Create React App", NPM, "build"),
    Project("ember", "Ember", NPM, "dist"),
    Project("rsbuild", "Rsbuild", NPM, "dist"),
    Project("parcel", "Parcel", NPM, "dist"),
    Project("webpack", "webpack", NPM, "dist"),
    Project("storybook", "Storybook", "npm install && npm run build-storybook", "storybook-static"),
    Project("sveltekit-static", "SvelteKit", NPM, "build"),
    Project("sveltekit-node", "SvelteKit", NPM, start="node build"),
    Project("next-export", "Next.js", NPM, "out"),
    Project("next", "Next.js", NPM, start="node_modules/.bin/next start -H $HOST -p $PORT"),
    Project("next-server", "Next.js with a server of its own", NPM, start="npm start"),
    Project("nuxt-generate", "Nuxt", NPM, ".output/public"),
    Project("nuxt", "Nuxt", NPM, start="node .output/server/index.mjs"),
    Project("react-router", "React Router", NPM, start="npm start"),
    Project("remix", "Remix", NPM, start="npm start"),
    Project("react-router-spa", "React Router", NPM, "build/client"),
    Project("remix-spa", "Remix", NPM, "build/client"),
    Project("tanstack-start", "TanStack Start", NPM, start="npm start"),
    Project("adonis", "AdonisJS", NPM, start="cd build && exec node bin/server.js"),
    Project("express", "Node.js", "npm install", start="npm start"),
    Project("node-with-build", "Node.js", NPM, start="npm start"),
    Project(
        "django",
        "Django",
        f"{PIP} && .venv/bin/pip install gunicorn && {PYTHON} manage.py collectstatic --noinput",
        start=f"{PYTHON} manage.py migrate --noinput && exec {GUNICORN} shop.wsgi",
        file="manage.py",
    ),
    Project(
        "fastapi",
        "FastAPI",
        f"{PIP} && .venv/bin/pip install uvicorn",
        start=UVICORN.format("main:app"),
        file="requirements.txt",
    ),
    Project(
        "starlette",
        "Starlette",
        "python3 -m venv .venv && .venv/bin/pip install uv"
        " && .venv/bin/uv pip install --python .venv/bin/python -r pyproject.toml",
        start=UVICORN.format("--factory app:create_app"),
        file="pyproject.toml",
    ),
    Project(
        "flask",
        "Flask",
        f"{PIP} && .venv/bin/pip install gunicorn",
        start=f"{GUNICORN} 'wsgi:create_app()'",
        file="requirements.txt",
    ),
    Project(
        "pnpm",
        "Node.js",
        f"{own('pnpm@9.15.0')} && pnpm install --frozen-lockfile",
        start=f"{MANAGER} pnpm run start",
    ),
    Project(
        "yarn",
        "Node.js",
        f"{own('@yarnpkg/cli-dist@4')} && export YARN_NODE_LINKER=node-modules && yarn install --immutable",
        start=f"{MANAGER} YARN_NODE_LINKER=node-modules yarn run start",
    ),
    Project("bun", "Bun", f"{own('bun@1')} && bun install --frozen-lockfile", start=f"{MANAGER} bun src/index.ts"),
    Project(
        "bun-with-start",
        "Node.js",
        f"{own('bun@1')} && bun install --frozen-lockfile",
        start=f"{MANAGER} bun run start",
    ),
    Project(
        "uv",
        "Starlette",
        "python3 -m venv .venv && .venv/bin/pip install uv && .venv/bin/uv sync --frozen --inexact --no-dev"
        " --no-python-downloads --python .venv/bin/python && .venv/bin/pip install uvicorn",
        start=UVICORN.format("main:app"),
        file="pyproject.toml",
    ),
    Project(
        "poetry",
        "Flask",
        "python3 -m venv .venv && python3 -m venv ~/poetry && ~/poetry/bin/pip install poetry &&"
        " POETRY_VIRTUALENVS_IN_PROJECT=true ~/poetry/bin/poetry install --only main --no-root"
        " && .venv/bin/pip install gunicorn",
        start=f"{GUNICORN} 'wsgi:create_app()'",
        file="pyproject.toml",
    ),
    Project("static", "static files", "", ".", file=""),
]
