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
async def test_a_branch_that_git_would_misread(gw: Gateway) -> None:
    for branch in ("--upload-pack=x", "", "a\nb", "a\x00b", "a\n", "x" * 251):
        response = await put(gw, repository={"url": URL, "branch": branch})
        assert refused(response, 400, "REQUEST_MALFORMED")["message"].startswith("repository.branch: ")
    refused(await gw.platform("GET", "apps/builds-badly"), 404, "NOT_FOUND")
    assert (await put(gw, repository={"url": URL, "branch": "feature/é-ü"})).json()["repository"][
        "branch"
    ] == "feature/é-ü"
    # With other invalid names, the deploy of a preview fails: every name has a slug.
    for branch in ("--upload-pack=x", "-u", "", "a\nb", "a\x00b", "a\x7f", "a\n", "x" * 251):
        response = await gw.platform("POST", "apps/builds-badly/deploys", {"kind": "preview", "branch": branch})
        assert "branch: " in refused(response, 400, "REQUEST_MALFORMED")["message"]
    assert (await gw.platform("DELETE", "apps/builds-badly")).status_code == 204


@settings(max_examples=60)
@given(st.text(st.sampled_from("ab./@{}-~^:?*[\\ \x01\x7fé"), max_size=8) | st.sampled_from(BRANCHES + GOOD_BRANCHES))
def test_the_rule_matches_gits(branch: str) -> None:
    """It accepts only names that git accepts, except options and names of the current branch."""
    if "\0" in branch or len(branch) > 250:
        assert not BRANCH.fullmatch(branch)
        return
    command = [require("git"), "check-ref-format", f"refs/heads/{branch}"]
    by_git = subprocess.run(command, check=False, cwd="/").returncode == 0
    assert bool(BRANCH.fullmatch(branch)) == (by_git and branch not in ("HEAD", "@") and not branch.startswith("-"))


@session
async def test_a_build_outside_the_source_or_that_no_process_can_have(gw: Gateway) -> None:
    outputs = ("..", "dist/../../etc", "/etc", "/", "dist/..", "dist\0")
    for field, value in (*(("output", each) for each in outputs), ("command", "make\0all"), ("start", "make\0all")):
        response = await put(gw, build={"command": "make", field: value})
        assert refused(response, 400, "REQUEST_MALFORMED")["message"].startswith(f"build.{field}: ")
    refused(await gw.platform("GET", "apps/builds-badly"), 404, "NOT_FOUND")
    for output in ("a/b", "./dist", "", ".", "a..b", "...", "dist/", "été"):
        assert check_build(Build(output=output)) == Build(output=output)
    assert check_build(None) is None


@session
async def test_a_switch_is_on_or_off(gw: Gateway) -> None:
    """Null is refused."""
    before = (await gw.platform("GET", "inference")).json()
    for field in ("enabled", "approved"):
        for value in (None, 0, 1, "true", "", []):
            response = await gw.platform("PUT", "inference", {field: value})
            assert field in refused(response, 400, "REQUEST_MALFORMED")["message"]
    assert (await gw.platform("PUT", "inference", {})).json() == before
