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
    Project("vite-without-script", "Vite", "npm install && npx vite build", "dist"),
    Project("astro", "Astro", NPM, "dist"),
    Project("eleventy", "Eleventy", "npm install && npx eleventy", "_site"),
    Project("gatsby", "Gatsby", NPM, "public"),
    Project("angular", "Angular", NPM, "dist/shop/browser"),
    Project("vue-cli", "Vue CLI", NPM, "dist"),
    Project("create-react-app", "Create React App", NPM, "build"),
    Project("sveltekit-static", "SvelteKit", NPM, "build"),
    Project("sveltekit-node", "SvelteKit", NPM, start="node build"),
    Project("next-export", "Next.js", NPM, "out"),
    Project("next", "Next.js", NPM, start="node_modules/.bin/next start -H $HOST -p $PORT"),
    Project("nuxt", "Nuxt", NPM, start="node .output/server/index.mjs"),
    Project("react-router", "React Router", NPM, start="npm start"),
    Project("remix", "Remix", NPM, start="npm start"),
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
    Project("pnpm", "Node.js", "npx -y -p pnpm@10 -c 'pnpm install --frozen-lockfile'", start="npm start"),
    Project(
        "yarn",
        "Node.js",
        "YARN_NODE_LINKER=node-modules npx -y -p @yarnpkg/cli-dist@4 -c 'yarn install --immutable'",
        start="npm start",
    ),
    Project("bun", "Node.js", "npx -y -p bun@1 -c 'bun install --frozen-lockfile'", start="npm start"),
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
