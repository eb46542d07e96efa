"""Makes a release of the commit that is checked out, and tries it: `make release` runs this.

Writes to dist/: the wheel, the source archive, the wheel's bill of materials (CycloneDX), the notes, and SHA256SUMS.

- Only committed files are read, and the time of the commit is the time of everything, so that each run gives the same
  bytes. The wheel is built again from the source archive, and must be the same.
- The wheel is installed into an empty environment, where tests/test_package.py runs the service from it.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(  # noqa: S603
        command, cwd=cwd, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nThis failed: {' '.join(map(str, command))}")
    return done.stdout


def build(source: Path, target: Path, kind: str) -> Path:
    """Builds the `wheel` or the `sdist` of a source tree."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", target, cwd=source)
    [made] = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


def read_notes(version: str) -> str:
    """Returns the version's section of the changelog."""
    found = re.search(rf"^## {re.escape(version)}\b.*\n+((?:(?!## ).*\n)+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    if found is None:
        sys.exit(f"CHANGELOG.md has no section for {version}.")
    return found[1]


def write_bill(wheel: Path, target: Path, scratch: Path) -> None:
    """Installs the wheel with the extras of the images, and lists everything that this brings."""
    environment = scratch / "environment"
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "-q", "install")
    run(*pip, "--no-compile", "-c", ROOT / "requirements.lock", f"{wheel}[otel,s3]")
    run(
        *(Path(sys.executable).with_name("cyclonedx-py"), "environment", "--output-reproducible", "--short-PURLs"),
        *("--pyproject", ROOT / "pyproject.toml", "--output-file", target, python),
    )
    # Its address names a folder of this machine.
    target.write_text(re.sub(r"file://[^\"]*/", "", target.read_text()))


def main() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct").strip()
    if changed := run("git", "status", "--porcelain").strip():
        sys.exit(f"Commit or remove these files first:\n{changed}")
    notes = read_notes(version)
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        run("git", "archive", "--output", scratch / "source.tar", "HEAD")
        with tarfile.open(scratch / "source.tar") as archive:
            archive.extractall(scratch / "source", filter="data")
        sdist = build(scratch / "source", DIST, "sdist")
        wheel = build(scratch / "source", DIST, "wheel")
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        again = build(scratch / sdist.name.removesuffix(".tar.gz"), scratch / "again", "wheel")
        if again.read_bytes() != wheel.read_bytes():
            sys.exit("The source archive gives another wheel.")
        write_bill(wheel, DIST / f"capsule_gateway-{version}.cdx.json", scratch)
    (DIST / "NOTES.md").write_text(notes)
    this_python = f"{sys.version_info.major}.{sys.version_info.minor}"
    tests = ("tests/test_package.py", "-k", f"one_typed or {this_python}")
    run(sys.executable, "-m", "pytest", "-q", *tests, CAPSULE_WHEEL=str(wheel))
    files = sorted(DIST.iterdir())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")


if __name__ == "__main__":
    main()
