"""find_key_set.lua lets one process fetch an app's public keys, and the others use its copy."""

from tests.lua.inference.conftest import NOON, KeySets
from tests.lua.scripts import SECOND


def test_the_copys_age_counts_from_its_fetch(key_sets: KeySets) -> None:
    key_sets.share(age=2_000)
    key_sets.set_clock(NOON + 5 * SECOND)
    assert key_sets.find(oldest=7_000)[:2] == ["copy", 7_000]
    assert key_sets.find(oldest=6_999) == ["fetch"]


def test_a_copy_is_bound_to_its_identity(key_sets: KeySets) -> None:
    key_sets.share(identity="before")
    assert key_sets.find("after") == ["fetch"]
    assert key_sets.find("third") == ["fetch"], "it does not wait for a fetch of other keys"
    key_sets.share("other keys", identity="third")
    assert key_sets.find("after") == ["wait"], "the claim still belongs to 'after'"
    assert key_sets.find("third")[3] == "other keys"
