"""One process at a time holds a key, such as that of the engine which serves the apps, and only one that has them."""

from typing import Any

from tests.lua.scripts import source

KEY, FOLDER = "{sites}:engine", "{sites}:folder"


def test_only_one_data_folder_has_the_apps(client: Any) -> None:
    """The record outlives its host: neither a restart nor a stalled Redis may hand the apps over to another folder."""
    script = client.register_script(source("hold_key"))

    def hold(engine: str, folder: str, lifetime: int = 15_000) -> bytes:
        held: bytes = script([KEY, FOLDER], [engine, lifetime, folder, 7 * 86_400])
        return held

    assert hold("one", "folder-1") == b"one"
    assert 14_000 < client.pttl(KEY) <= 15_000
    client.expire(FOLDER, 60)
    assert [hold("two", "folder-2"), hold("two", "folder-2", 0)] == [b"one"] * 2, "it serves"
    assert hold("one", "folder-1", 0) == b""
    assert hold("two", "folder-2") == b"", "its apps are elsewhere"
    assert client.ttl(FOLDER) == 60, "the other folder does not extend the record"
    assert not client.exists(KEY)
    assert hold("one", "folder-1") == b"one"
    assert client.ttl(FOLDER) > 60
    client.delete(KEY, FOLDER)  # an operator deletes it
    assert hold("two", "folder-2") == b"two"
    assert hold("two", "") == b"two"
    assert not client.exists(FOLDER), "the storage is shared now"
