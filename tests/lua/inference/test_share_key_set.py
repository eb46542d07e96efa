"""share_key_set.lua shares a fetched key set for a limited time."""

from tests.lua.inference.conftest import KEY_SET_KEYS, KEY_SET_LIFE, NOON, KeySets
from tests.lua.scripts import SECOND


def test_a_copy_ends_with_its_life(key_sets: KeySets) -> None:
    key_sets.share(age=100_000)
    assert 199_000 < key_sets.client.pttl(KEY_SET_KEYS[0]) <= 200_000
    key_sets.set_clock(NOON + 200 * SECOND)
    assert key_sets.find()[0] == "copy"
    key_sets.set_clock(NOON + 201 * SECOND)
    assert key_sets.find() == ["fetch"]
    key_sets.share("new", age=KEY_SET_LIFE)
    key_sets.client.delete(KEY_SET_KEYS[0])
    key_sets.share("too old", age=KEY_SET_LIFE)
    assert not key_sets.client.exists(KEY_SET_KEYS[0])


def test_an_older_document_does_not_replace_a_newer_one(key_sets: KeySets) -> None:
    key_sets.share("new", age=1_000)
    key_sets.share("old", age=4_000)
    assert key_sets.find()[3] == "new"


def test_a_document_from_the_future_is_not_shared(key_sets: KeySets) -> None:
    """A switchover may set the time back during the fetch. The copy would then seem younger than it is."""
    key_sets.share(age=-1_000)
    key_sets.set_clock(NOON + SECOND)
    assert key_sets.find() == ["fetch"]


def test_a_copy_from_the_future_is_not_used(key_sets: KeySets) -> None:
    key_sets.share("future")
    key_sets.set_clock(NOON - 60 * SECOND)
    assert key_sets.find() == ["fetch"]
    key_sets.share("now")
    assert key_sets.find()[3] == "now"
