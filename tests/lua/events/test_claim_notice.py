"""Only the worker for which a notice is pending can send it, and only to an address that still wants it."""

from typing import Any

import msgspec

from tests.lua.scripts import TAG, source

STREAM, NOTICES, DELETIONS, MEMBERS = f"{TAG}:mails", f"{TAG}:notices:acc", f"{TAG}:deletions", f"{TAG}:members:acc"
INVITATIONS = f"{TAG}:invitations:acc"
GROUP, ADA = "notices", b'{"address":"ada@example.com","kinds":["budget"]}'


def test_claimed_by_the_worker_for_which_it_is_pending(client: Any) -> None:
    script = client.register_script(source("events/claim_notice"))

    def claim(consumer: str, kind: str = "budget") -> list[Any]:
        args = [GROUP, consumer, entry, "acc", "hash", kind, "owner", "developer"]
        return list(script([STREAM, NOTICES, DELETIONS, MEMBERS, INVITATIONS], args))

    client.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    entry = client.xadd(STREAM, {"account": "acc"})
    assert claim("one") == [0, b""], "nobody has read it"
    client.xreadgroup(GROUP, "one", {STREAM: ">"})
    assert claim("one") == [1, b""]
    assert claim("two") == [0, b""]
    client.hset(NOTICES, "hash", ADA)
    assert claim("one") == [1, b""], "the account has no members"
    for role, found in {"viewer": b"", "developer": ADA, "owner": ADA}.items():
        client.set(MEMBERS, '{"members":{"ada@example.com":{"role":"%s"}}}' % role)
        assert claim("one") == [1, found]
    client.set(MEMBERS, '{"members":{"bob@example.com":{"role":"owner"}}}')
    assert claim("one") == [1, b""], "the person has left the account"
    client.set(MEMBERS, '{"members":{"ada@example.com":{"role":"owner"}}}')
    assert claim("one", "invitation") == [1, b""], "the address is not invited"
    client.set(INVITATIONS, '{"hash":{"email":"eve@example.com"},"other":{"email":"bob@example.com"}}', ex=60)
    assert msgspec.json.decode(claim("one", "invitation")[1]) == {"address": "eve@example.com", "kinds": ["invitation"]}
    client.zadd(DELETIONS, {"acc": 1})
    for kind in ("budget", "invitation"):
        assert claim("one", kind) == [1, b""]
    client.zrem(DELETIONS, "acc")
    client.xclaim(STREAM, GROUP, "two", 0, [entry])
    assert claim("one") == [0, b""]
    assert claim("two") == [1, ADA]
