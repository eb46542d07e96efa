"""Serves the browser module at an app's own address, as a host does, with a fake sign-in."""

import json
import mimetypes
from pathlib import Path

from tests.fakes.server import Exchange, FakeServer, Script, answer

MODULE = Path(__file__).parents[2] / "capsule"


class Site(FakeServer):
    """The app's site. `env` are the variables of its build; with None, the module is served as it is in the folder."""

    def __init__(self) -> None:
        super().__init__()
        self.env: dict[str, str] | None = {}
        self.token: str | None = None

    def script(self, exchange: Exchange) -> Script:
        path = exchange.path.lstrip("/")
        if path == "session":
            return answer(200, {"token": self.token}) if self.token else answer(503)
        if path == "blank":
            return _file("text/html", b"<!doctype html><title>An app</title>")
        file = MODULE / path
        if not file.is_file():
            return answer(404)
        content = file.read_bytes()
        if path == "lib/ai.js" and self.env is not None:
            content = b"import.meta.env = %b; %b" % (json.dumps(self.env).encode(), content)
        return _file(mimetypes.guess_type(file.name)[0] or "text/plain", content)


class Folder(FakeServer):
    """Serves the files of a built app, and the tokens of its backend."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.token = folder, ""

    def script(self, exchange: Exchange) -> Script:
        if exchange.path == "/token":
            return answer(200, {"token": self.token})
        file = self.folder / (exchange.path.lstrip("/") or "index.html")
        if not file.is_file():
            return answer(404)
        return answer(200, file.read_bytes(), {"Content-Type": mimetypes.guess_type(file.name)[0] or "text/plain"})


def _file(kind: str, content: bytes) -> Script:
    return answer(200, content, {"Content-Type": f"{kind}; charset=utf-8"})
