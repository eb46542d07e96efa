"""The files that GitHub, Renovate and Docker Compose read follow their schemas."""

from pathlib import Path

import check_jsonschema
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
FILES = {
    "github-workflows": [
        ".github/workflows/clients.yml",
        ".github/workflows/kubernetes.yml",
        ".github/workflows/release.yml",
        ".github/workflows/test.yml",
    ],
    "github-issue-forms": [".github/ISSUE_TEMPLATE/fault.yml", ".github/ISSUE_TEMPLATE/proposal.yml"],
    "github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
    "renovate": ["renovate.json"],
    "compose-spec": ["compose.yaml"],
}


@pytest.mark.parametrize("schema", FILES)
def test_a_file_follows_its_schema(schema: str) -> None:
    files = [str(ROOT / name) for name in FILES[schema]]
    result = CliRunner().invoke(check_jsonschema.main, ["--builtin-schema", f"vendor.{schema}", *files])
    assert result.exit_code == 0, result.output


def test_every_file_is_checked() -> None:
    present = {str(path.relative_to(ROOT)) for path in (ROOT / ".github").rglob("*") if path.is_file()}
    assert present == {name for names in FILES.values() for name in names if name.startswith(".github")}
