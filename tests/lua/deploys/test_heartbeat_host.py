"""A host counts for the lifetime of its last heartbeat, if it has the apps."""

from typing import Any

from tests.lua.scripts import SECOND, on_test_clock, set_clock

KEY, FOLDER = "{sites}:hosts", "{sites}:folder"
WEEK = 7 * 86_400


def test_a_host_counts_until_its_last_heartbeat_expires(client: Any) -> None:
    script = client.register_script(on_test_clock("deploys/heartbeat_host"))

    def attend(host: str, clock: int) -> list[bytes]:
        set_clock(client, clock * SECOND)
        accepted, *hosts = script([KEY, FOLDER], [host, 15_000, "", WEEK])
        assert accepted == 1
        return sorted(hosts)

    assert attend("", 1_000) == []
    assert attend("one", 1_000) == [b"one"]
    assert attend("two", 1_010) == [b"one", b"two"]
    assert attend("", 1_014) == [b"one", b"two"]
    assert attend("two", 1_016) == [b"two"]
    assert attend("one", 1_017) == [b"one", b"two"]
    assert 0 < client.pttl(KEY) <= 30_000


def test_only_one_data_folder_has_the_apps(client: Any) -> None:
    """The record outlives its hosts: neither a restart nor a stalled Redis may hand the apps over to another folder."""
    set_clock(client, 1_000 * SECOND)
    script = client.register_script(on_test_clock("deploys/heartbeat_host"))

    def attend(host: str, folder: str) -> list[Any]:
        reply: list[Any] = script([KEY, FOLDER], [host, 15_000, folder, WEEK])
        return reply

    assert attend("one", "folder-1") == [1, b"one"]
    client.expire(FOLDER, 60)
    assert attend("two", "folder-2") == attend("", "folder-2") == [0]
    assert client.ttl(FOLDER) == 60, "the other folder does not extend the record"
    assert attend("", "folder-1") == [1, b"one"]
    assert client.ttl(FOLDER) > 60
    client.delete(FOLDER)  # an operator deletes it
    assert attend("two", "folder-2") == [1, b"one", b"two"]
    assert attend("three", "") == [1, b"one", b"three", b"two"]
    assert not client.exists(FOLDER), "the storage is shared now"
