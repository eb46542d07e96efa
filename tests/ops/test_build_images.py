"""The script that builds the images without Docker agrees with the Dockerfile."""

import re
import subprocess

from tests.support.dockerfile import DOCKERFILE, read_stages

SCRIPT = DOCKERFILE.parent / "ops/build-images"


def test_script_names_the_bases_and_targets_of_the_dockerfile() -> None:
    script, dockerfile = SCRIPT.read_text(), DOCKERFILE.read_text()
    bases = set(re.findall(r"--build-arg (\w+)=", script))
    assert bases == set(re.findall(r"^ARG (\w+)=", dockerfile, re.MULTILINE)) == {"BASE", "BUILD_BASE"}
    targets = set(re.findall(r"^build (\w+)$", script, re.MULTILINE))
    assert targets == {"gateway", "builder"} <= {*read_stages()}


def test_no_image_has_pip_and_its_configuration() -> None:
    bases = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert [stage for base, stage in bases if base == "${BUILD_BASE}"] == ["build"]
    assert "pip install" not in "".join(text for stage, text in read_stages().items() if stage != "build")


def test_script_shows_its_help() -> None:
    for arguments in ([], ["--help"]):
        shown = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=30)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.startswith("Usage: ops/build-images FOLDER\n")
