"""Copies of an app's data, stored and fetched by two hosts. A packer of the test stores one file as it is."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from gateway.deploys import scripts
from gateway.errors import BackboneUnavailable
from gateway.keys import PARTITION_TAGS
from gateway.redis.client import Store
from gateway.storage import FolderStorage, Storage, read_object
from workers.hosting.claims import Claims, make_claim
from workers.hosting.copies import Copies, HeldClaim, copy_key, read_fence
from workers.hosting.data import AppData
from workers.hosting.packing import DataError


class Packer:
    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def store_copy(self, data: AppData, key: str) -> str:
        text = (data.files / "note").read_bytes()
        await self._storage.put(key, text)
        return hashlib.sha256(text).hexdigest()

    async def fetch_copy(self, data: AppData, account: str, key: str, digest: str) -> None:
        text = await read_object(self._storage, key, 1_000)
        assert text is not None
        assert hashlib.sha256(text).hexdigest() == digest
        write(data, text.decode(), account)

    async def fetch_newest(self, data: AppData, account: str) -> bool:
        if (text := await read_object(self._storage, "newest", 1_000)) is not None:
            write(data, text.decode(), account)
        return text is not None


def write(data: AppData, text: str, account: str = "acc_1") -> None:
    data.files.mkdir(parents=True, exist_ok=True)
    (data.folder / "account").write_text(account)
    (data.files / "note").write_text(text)


def read(data: AppData) -> str:
    return (data.files / "note").read_text()


class Host:
    def __init__(self, name: str, store: Store, folder: Path) -> None:
        self.name, self.claims = name, Claims(store)
        self.storage = FolderStorage(folder / "storage")
        self.copies = Copies(self.storage, self.claims, Packer(self.storage), 0)
        self.data = AppData(folder / name, "shop")
        self.held: HeldClaim | None = None

    async def claim(self, account: str = "acc_1") -> bool:
        """Claims the app, and returns whether its data were fetched."""
        await self.claims.read_changes()
        stored = self.claims.find(account, "shop")
        claim = make_claim(account, "shop", self.name, f"session of {self.name}", stored.claim if stored else None)
        assert await self.claims.replace(stored, claim)
        self.held = HeldClaim(self.claims.require(claim))
        return await self.copies.fetch(self.held, self.data)

    async def update(self) -> bool:
        assert self.held is not None
        return await self.copies.update(self.held, self.data, last=True)

    async def list_copies(self) -> list[str]:
        return await self.storage.list_names("data/shop/copies/")


async def test_an_app_from_another_engine_begins_with_its_newest_snapshot(pair: tuple[Host, Host]) -> None:
    one, two = pair
    await one.storage.put("newest", b"from a cluster")
    assert await one.claim()
    assert read(one.data) == "from a cluster"
    write(one.data, "newer")
    await one.update()
    assert await two.claim()
    assert read(two.data) == "newer"


@pytest.fixture
def pair(store: Store, tmp_path: Path) -> tuple[Host, Host]:
    return Host("one", store, tmp_path), Host("two", store, tmp_path)


async def test_the_next_host_continues_with_the_last_copy(pair: tuple[Host, Host]) -> None:
    one, two = pair
    assert not await one.claim(), "there is nothing yet"
    write(one.data, "first")
    await one.update()
    write(one.data, "second!")
    await one.update()
    assert len(await one.list_copies()) == 1, "the one before is removed"
    assert await two.claim()
    assert read(two.data) == "second!"
    assert two.held is not None
    assert two.held.claim.died
    # The same host needs no copy: it has newer data.
    write(two.data, "newest.")
    assert not await two.claim()
    assert read(two.data) == "newest."
    # But the other one's data are old by now.
    await two.update()
    assert await one.claim()
    assert read(one.data) == "newest."


async def test_what_a_host_stores_after_it_was_replaced_is_never_used(pair: tuple[Host, Host]) -> None:
    one, two = pair
    await one.claim()
    write(one.data, "good")
    await one.update()
    assert await two.claim()
    write(one.data, "too late")
    await one.update()
    assert len(await one.list_copies()) == 2, "it has removed nothing"
    assert two.held is not None
    assert two.held.claim.copy is not None
    assert await read_object(two.storage, copy_key("shop", two.held.claim.copy.name), 100) == b"good"
    write(two.data, "good, and more")
    await two.update()
    [name] = await two.list_copies()
    assert read_fence(name) == two.held.claim.fence
    third = await one.claim()
    assert third
    assert read(one.data) == "good, and more"


async def test_a_host_that_has_not_fetched_the_data_copies_nothing(pair: tuple[Host, Host]) -> None:
    """It may have files from the last time that it ran the app."""
    one, two = pair
    await one.claim()
    write(one.data, "old")
    await one.update()
    await two.claim()
    write(two.data, "new, and more")
    await two.update()
    await one.claims.read_changes()
    stored = one.claims.find("acc_1", "shop")
    assert stored is not None
    claim = make_claim("acc_1", "shop", one.name, "another session", stored.claim)
    assert await one.claims.replace(stored, claim)
    held = HeldClaim(one.claims.require(claim))
    assert await one.copies.update(held, one.data, last=True)
    assert await two.claim()
    assert read(two.data) == "new, and more"


async def test_a_write_that_seemed_to_fail_does_not_end_the_copying(
    pair: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    await one.claim()
    write(one.data, "first")

    async def set_claim(*args: Any) -> bool:
        monkeypatch.undo()
        assert await scripts.set_claim(*args)
        raise BackboneUnavailable

    monkeypatch.setattr(scripts, "set_claim", set_claim)
    with pytest.raises(BackboneUnavailable):
        await one.update()
    assert not await one.update(), "the claim is another text than this host knows"
    await one.claims.read_changes()
    assert one.held is not None
    assert one.held.refresh(one.claims.find("acc_1", "shop"))
    write(one.data, "second!")
    assert await one.update()
    assert await two.claim()
    assert read(two.data) == "second!"
    await two.claims.read_changes()
    await one.claims.read_changes()
    assert not one.held.refresh(one.claims.find("acc_1", "shop")), "the other host has it"
    assert not one.held.refresh(None)


async def test_data_that_cannot_be_packed_are_not_packed_all_the_time(pair: tuple[Host, Host]) -> None:
    one, _ = pair
    await one.claim()
    write(one.data, "odd")
    attempts = 0

    async def fail(*_: object) -> str:
        nonlocal attempts
        attempts += 1
        raise DataError("No snapshot was made.")

    packer = Packer(one.storage)
    packer.store_copy = fail  # type: ignore[method-assign]
    copies = Copies(one.storage, one.claims, packer, 60)
    assert one.held is not None
    with pytest.raises(DataError):
        await copies.update(one.held, one.data)
    await asyncio.sleep(0.2)
    assert await copies.update(one.held, one.data)
    assert attempts == 1


async def test_fences_grow_even_if_redis_has_lost_the_claims(pair: tuple[Host, Host], store: Store) -> None:
    one, two = pair
    fences = []
    for number in range(6):
        host = pair[number % 2]
        await host.claim()
        assert host.held is not None
        fences.append(host.held.claim.fence)
        if number == 3:
            await store.client.flushdb()
    assert fences == sorted(set(fences))
    assert one.claims.list_all() or two.claims.list_all()
    await store.client.delete(*(f"{tag}:claims" for tag in PARTITION_TAGS))


async def test_data_of_another_account_are_not_continued(pair: tuple[Host, Host]) -> None:
    """An app of the same id may later belong to another account."""
    one, _ = pair
    await one.claim()
    write(one.data, "private")
    await one.update()
    assert not await one.claim("acc_2")
    assert one.held is not None
    assert (one.held.claim.copy, one.held.claim.former) == (None, 0)
