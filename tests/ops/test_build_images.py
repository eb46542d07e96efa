"""What the script that builds the images without Docker expects of the Dockerfile."""

import re
import subprocess

from tests.ops.test_compose import ROOT, stages

SCRIPT = ROOT / "ops/build-images"


def test_it_names_bases_and_targets_that_the_dockerfile_has() -> None:
    script, dockerfile = SCRIPT.read_text(), (ROOT / "Dockerfile").read_text()
    bases = set(re.findall(r"--build-arg (\w+)=", script))
    assert bases == set(re.findall(r"^ARG (\w+)=", dockerfile, re.MULTILINE)) == {"BASE", "BUILD_BASE"}
    targets = set(re.findall(r"^build (\w+)$", script, re.MULTILINE))
    assert targets == {"gateway", "builder"} <= {*stages()}


def test_only_the_stage_that_is_in_no_image_has_pip_and_its_configuration() -> None:
    bases = re.findall(r"^FROM (\S+) AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert [stage for base, stage in bases if base == "${BUILD_BASE}"] == ["build"]
    assert "pip install" not in "".join(text for stage, text in stages().items() if stage != "build")


def test_it_shows_its_help() -> None:
    for arguments in ([], ["--help"]):
        shown = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=30)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.startswith("Usage: ops/build-images FOLDER\n")
