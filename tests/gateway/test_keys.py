"""The tables of keys, and what a backup has of them."""

import re

from redis.crc import key_slot

from gateway import keys
from gateway.settings import DEFAULT_PROVIDER


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
            keys.trial_key(name),
            keys.answers_of_provider_key(name),
            keys.failed_accounts_key(name),
            *keys.lease_keys(name, rated=True),
        ]
        assert {keys.kind_of(key) for key in made} <= keys.LEFT_OUT


def test_a_providers_health_is_written_in_one_slot() -> None:
    for name in (DEFAULT_PROVIDER, "paris-1"):
        assert key_slot(keys.provider_key(name).encode()) == key_slot(keys.failed_accounts_key(name).encode())
