"""Invalid fields of an app's record are refused by name, before any build uses them."""

import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.accounts.app_fields import check_build
from gateway.accounts.records import BRANCH, Build
from tests.support.gateway_process import Gateway
from tests.support.programs import require
from tests.support.responses import refused

session = pytest.mark.asyncio(loop_scope="session")
URL = "https://git.example.org/shop.git"

# Branches that git refuses, or takes for an option.
BRANCHES = ["--upload-pack=x", "-u", "", " ", "a b", "a..b", "a~1", "a^", "a:b", "a?", "a*", "a[", "a\\b", "a\nb"]
BRANCHES += ["a\x00b", "a\x7f", "/a", "a/", "a//b", ".a", "a/.b", "a.", "a.lock", "a.lock/b", "@", "a@{b", "HEAD"]
BRANCHES += ["x" * 251]
GOOD_BRANCHES = ["main", "release/1.2", "feature/é-ü", "a@b", "a-b_c", "x" * 250, "head", "a.locks", "@a", "{a}"]


async def put(gw: Gateway, **fields: Any) -> Any:
    return await gw.platform("PUT", "apps/builds-badly", {"account": (await gw.account()).id, **fields})


@session
@pytest.mark.parametrize("branch", BRANCHES)
async def test_a_branch_that_git_would_misread(gw: Gateway, branch: str) -> None:
    response = await put(gw, repository={"url": URL, "branch": branch})
    assert refused(response, 400, "REQUEST_MALFORMED")["message"].startswith("repository.branch: ")
    refused(await gw.platform("GET", "apps/builds-badly"), 404, "NOT_FOUND")


@session
@pytest.mark.parametrize("branch", GOOD_BRANCHES)
async def test_a_branch(gw: Gateway, branch: str) -> None:
    response = await put(gw, repository={"url": URL, "branch": branch})
    assert response.status_code == 200, response.text
    assert response.json()["repository"]["branch"] == branch
    assert (await gw.platform("DELETE", "apps/builds-badly")).status_code == 204


@session
@pytest.mark.parametrize("branch", ["--upload-pack=x", "-u", "", "a\nb", "a\x00b", "a\x7f", "a\n", "x" * 251])
async def test_a_previews_branch_that_git_would_misread(gw: Gateway, branch: str) -> None:
    """With other invalid names the deploy fails: every name has a slug."""
    created = await gw.platform(
        "PUT", "apps/previewed", {"account": (await gw.account()).id, "repository": {"url": URL}}
    )
    assert created.status_code == 200, created.text
    response = await gw.platform("POST", "apps/previewed/deploys", {"kind": "preview", "branch": branch})
    assert "branch: " in refused(response, 400, "REQUEST_MALFORMED")["message"]
    assert (await gw.platform("DELETE", "apps/previewed")).status_code == 204


@settings(max_examples=60)
@given(st.text(st.sampled_from("ab./@{}-~^:?*[\\ \x01\x7fé"), max_size=8) | st.sampled_from(BRANCHES + GOOD_BRANCHES))
def test_the_rule_matches_gits(branch: str) -> None:
    """It accepts only names that git accepts, except options and names of the current branch."""
    if "\0" in branch or len(branch) > 250:
        return
    command = [require("git"), "check-ref-format", f"refs/heads/{branch}"]
    by_git = subprocess.run(command, check=False, cwd="/").returncode == 0
    assert bool(BRANCH.fullmatch(branch)) == (by_git and branch not in ("HEAD", "@") and not branch.startswith("-"))


@session
@pytest.mark.parametrize(
    "output", ["../../etc", "..", "dist/../../etc", "/etc", "/", "dist/..", "./../x", "dist\0", "//etc/passwd"]
)
async def test_an_output_outside_the_source(gw: Gateway, output: str) -> None:
    response = await put(gw, build={"command": "make", "output": output})
    assert refused(response, 400, "REQUEST_MALFORMED")["message"].startswith("build.output: ")
    refused(await gw.platform("GET", "apps/builds-badly"), 404, "NOT_FOUND")


@pytest.mark.parametrize("output", ["dist", "a/b", "./dist", "", ".", "a..b", "...", "dist/", "été"])
def test_an_output(output: str) -> None:
    build = Build(output=output)
    assert check_build(build) == build
    assert check_build(None) is None


@session
@pytest.mark.parametrize("field", ["command", "start"])
async def test_a_command_that_no_process_can_have(gw: Gateway, field: str) -> None:
    """A NUL ends an argument, so no engine can start the command."""
    response = await put(gw, build={field: "make\0all"})
    assert refused(response, 400, "REQUEST_MALFORMED")["message"].startswith(f"build.{field}: ")


@session
@pytest.mark.parametrize("field", ["enabled", "approved"])
async def test_a_switch_is_on_or_off(gw: Gateway, field: str) -> None:
    """Null is refused."""
    before = (await gw.platform("GET", "inference")).json()
    for value in (None, 0, 1, "true", "", []):
        response = await gw.platform("PUT", "inference", {field: value})
        assert field in refused(response, 400, "REQUEST_MALFORMED")["message"]
    assert (await gw.platform("PUT", "inference", {})).json() == before
