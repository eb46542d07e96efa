"""The declarations of keys, and what a backup has of them."""

from redis.crc import key_slot

from gateway import keys
from gateway.settings import DEFAULT_PROVIDER
from tests.support.key_leaks import EXPLAINED


def test_a_backup_has_all_keys_of_a_kind_or_none() -> None:
    assert not {key.kind for key in keys.KEYS if key.saved} & {key.kind for key in keys.KEYS if not key.saved}


def test_each_key_is_declared_once_and_completely() -> None:
    assert len({key.name for key in keys.KEYS}) == len(keys.KEYS) > 100
    for key in keys.KEYS:
        assert key.holds.partition(": ")[0] in {"string", "hash", "set", "zset", "list", "stream", "rate window"}
        assert key.ends


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


def test_only_keys_that_the_service_removes_may_have_no_expiry() -> None:
    for kept in (keys.app_key("one"), keys.provider_key("one"), keys.account_apps_key("acc_1"), keys.apps_key("{p09}")):
        assert EXPLAINED.fullmatch(kept), kept
    for ends in (keys.session_key("a"), keys.probe_key("one"), *keys.reservation_keys("{p09}"), *keys.lease_keys()):
        assert not EXPLAINED.fullmatch(ends), ends
