import re

import pytest

from gateway.accounts.records import SLUG
from gateway.deploys.addresses import host, slug


@pytest.mark.parametrize(
    ("branch", "expected"),
    [
        ("main", "main"),
        ("Fix/The  Thing!", "fix-the-thing"),
        ("a" * 30, "a" * 19),
        ("abcdefghijklmnopqr-stu", "abcdefghijklmnopqr"),
        ("日本", "preview"),
    ],
)
def test_slugs(branch: str, expected: str) -> None:
    assert slug(branch) == expected
    assert re.fullmatch(r"[a-z0-9-]{1,19}", slug(branch))
    assert host("shop", "preview", branch, "apps.example") == f"shop--p-{expected}.apps.example"
    assert host("shop", "preview", None, "apps.example") == "shop-preview.apps.example"
    assert host("shop", "live", branch, "apps.example") == "shop.apps.example"


@pytest.mark.parametrize("length", [40, 55, 56, 63])
def test_a_previews_host_name_is_a_dns_label(length: int) -> None:
    """Names that differ only at their ends keep different addresses."""
    apps = ["a" * (length - 1) + last for last in "bc"]
    for branch in (None, "fix", "b" * 30):
        labels = [host(app, "preview", branch, "apps.example").partition(".")[0] for app in apps]
        assert len({*labels}) == 2
        for app, label in zip(apps, labels, strict=True):
            assert re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])", label)
            assert label.endswith("-preview" if branch is None else f"--p-{slug(branch)}")
            assert label.startswith(app) == (len(app) <= (55 if branch is None else 59 - len(slug(branch))))
            if branch is not None:
                assert label.partition("--p-")[2] == slug(branch)


def test_no_app_has_the_address_of_a_shortened_name() -> None:
    for branch, suffix in ((None, "-preview"), ("b" * 30, f"--p-{slug('b' * 30)}")):
        label = host("v" * 63, "preview", branch, "apps.example").partition(".")[0]
        for name in (label, label.removesuffix(suffix), label.removesuffix("-preview")):
            assert SLUG.fullmatch(name) is None
        assert re.search(r"--[0-9a-f]{16}", label)
