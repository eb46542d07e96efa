"""A package registry for npm and pip, over HTTPS. It has one package for each."""

import base64
import gzip
import hashlib
import io
import socket
import tarfile
import zipfile
from pathlib import Path

from tests.fakes.receiver import certificate
from tests.fakes.server import Exchange, FakeServer, Script, answer

NAME, VERSION = "greeting", "1.0.0"
WHEEL = f"{NAME}-{VERSION}-py3-none-any.whl"


class FakeRegistry(FakeServer):
    def __init__(self, folder: Path, name: str) -> None:
        """`name` is a host name of this machine. The folder gets the certificate of the registry's own authority."""
        tls, self.ca_file = certificate(folder, name)
        super().__init__(tls)
        self.name, self.host = name, socket.gethostbyname(name)
        self.redirects: dict[str, str] = {}  # by path

    @property
    def address(self) -> str:
        return f"https://{self.name}:{self.port}"

    def script(self, exchange: Exchange) -> Script:
        path = exchange.path.partition("?")[0]
        if path in self.redirects:
            return answer(302, headers={"Location": self.redirects[path]})
        html = {"Content-Type": "text/html"}
        match path:
            case "/npm/greeting":
                return answer(200, self._describe_package())
            case "/npm/greeting.tgz":
                return answer(200, TARBALL)
            case "/pip/greeting/":
                return answer(200, f'<a href="../{WHEEL}">{WHEEL}</a>'.encode(), html)
            case other if other == f"/pip/{WHEEL}":
                return answer(200, pack_wheel())
        return answer(404)

    def _describe_package(self) -> dict[str, object]:
        dist = {"tarball": f"{self.address}/npm/greeting.tgz", "integrity": INTEGRITY}
        return {
            "name": NAME,
            "dist-tags": {"latest": VERSION},
            "versions": {VERSION: {"name": NAME, "version": VERSION, "dist": dist}},
        }


def _pack_tarball() -> bytes:
    files = {"package.json": f'{{"name": "{NAME}", "version": "{VERSION}"}}', "index.js": "module.exports = 'from npm'"}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(archive.getvalue(), mtime=0)


TARBALL = _pack_tarball()
INTEGRITY = "sha512-" + base64.b64encode(hashlib.sha512(TARBALL).digest()).decode()


def pack_wheel() -> bytes:
    info = f"{NAME}-{VERSION}.dist-info"
    files = {
        f"{NAME}.py": "text = 'from pip'",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return archive.getvalue()
