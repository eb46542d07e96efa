"""The tables of keys, and what a backup has of them."""

import re

from gateway import keys


def test_every_kind_of_key_is_backed_up_or_left_out() -> None:
    """A new key needs a decision."""
    table = re.findall(r"^\| `([^`]+)` \|", keys.__doc__ or "", re.MULTILINE)
    kinds = {keys.kind_of(key.replace("{pNN}", keys.PARTITION_TAGS[0])) for key in table}
    assert kinds == keys.BACKED_UP | keys.LEFT_OUT
    assert not keys.BACKED_UP & keys.LEFT_OUT


def test_keys_of_named_providers_are_those_of_a_provider() -> None:
    for name in ("one", "paris-1"):
        made = [
            keys.provider_key(name),
            keys.probe_key(name),
            keys.refusal_key(name),
            *keys.lease_keys(name, rated=True),
        ]
        assert {keys.kind_of(key) for key in made} <= keys.LEFT_OUT
