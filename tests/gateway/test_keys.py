"""The tables of keys, and what a backup has of them."""

import re

from gateway import keys


def test_every_kind_of_key_is_backed_up_or_left_out() -> None:
    """A new key needs a decision."""
    table = re.findall(r"^\| `([^`]+)` \|", keys.__doc__ or "", re.MULTILINE)
    kinds = {keys.kind_of(key.replace("{pNN}", keys.PARTITION_TAGS[0])) for key in table}
    assert kinds == keys.BACKED_UP | keys.LEFT_OUT
    assert not keys.BACKED_UP & keys.LEFT_OUT
