"""Deploy hooks: secret URLs that queue a deploy of one app. Redis stores only the digest of a hook's token."""

import contextlib
import secrets

import msgspec

from gateway.accounts.access import Access
from gateway.accounts.api_keys import digest
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.errors import NotFound, RequestMalformed
from gateway.ids import Time, new_id, now_iso, time_of
from gateway.keys import hook_key, hooks_key, hooks_used_key
from gateway.settings import Settings
from gateway.validation import read_name

TRIGGERS_PER_MINUTE = 6  # of one hook
MAX_HOOKS = 100  # of one account


class Hook(msgspec.Struct, frozen=True):
    id: str
    name: str
    app: str
    appId: str
    account: str
    createdAt: str


class HookView(msgspec.Struct):
    """A hook as its account sees it."""

    id: str
    name: str
    app: str
    createdAt: Time


class CreatedHook(HookView):
    url: str  # the secret; shown only here


class ListedHook(HookView):
    lastUsedAt: Time | None


class Hooks:
    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._registry, self._store = settings, registry, registry.store

    async def create(self, account_id: str, app: str, name: str) -> CreatedHook:
        found = await self._registry.find_app(app)
        if found is None or found.account != account_id:
            raise NotFound("There is no such app in this account.")
        name = read_name(name, 100)
        token = secrets.token_urlsafe(32)
        hook = Hook(new_id("hook"), name, found.name, found.id, account_id, now_iso())
        record, key = msgspec.json.encode(hook).decode(), hooks_key(account_id)
        if await self._store.client.hlen(key) >= MAX_HOOKS:
            raise RequestMalformed(f"An account has at most {MAX_HOOKS} hooks; revoke one first.")
        # Listed first and enabled second, so that every hook that works can be found and revoked.
        await self._store.client.hset(key, hook.id, msgspec.json.encode([digest(token), hook]).decode())
        await self._store.client.set(hook_key(digest(token)), record)
        if not await self._store.client.hexists(key, hook.id):
            await self._store.client.delete(hook_key(digest(token)))
            raise NotFound("The hook was revoked while it was created.")
        url = f"{self._settings.api_url}/hooks/deploy/{token}"
        return CreatedHook(hook.id, hook.name, hook.app, hook.createdAt, url)

    async def list(self, access: Access) -> list[ListedHook]:
        """Returns the hooks that the caller may see, newest first, each with the present name of its app."""
        account_id = access.account.id
        records = await self._store.client.hgetall(hooks_key(account_id))
        used = await self._store.client.hgetall(hooks_used_key(account_id))
        names = {app.id: app.name for app in await self._registry.list_apps(account_id)} if records else {}
        hooks = [msgspec.json.decode(record, type=tuple[str, Hook])[1] for record in records.values()]
        hooks.sort(key=lambda hook: hook.id, reverse=True)
        return [
            ListedHook(
                id=hook.id,
                name=hook.name,
                app=names.get(hook.appId, hook.app),
                createdAt=hook.createdAt,
                lastUsedAt=now_iso(int(used[hook.id]) / 1000) if hook.id in used else None,
            )
            for hook in hooks
            if access.reaches(names.get(hook.appId, hook.app))
        ]

    async def revoke(self, account_id: str, hook_id: str) -> None:
        # A text that is no id may be a hook's secret, which Redis must not see.
        known = time_of(hook_id) is not None
        record = await self._store.client.hget(hooks_key(account_id), hook_id) if known else None
        if record is None:
            raise NotFound("There is no such hook in this account.")
        hashed, _ = msgspec.json.decode(record, type=tuple[str, Hook])
        await self._store.client.delete(hook_key(hashed))
        await self._store.client.hdel(hooks_key(account_id), hook_id)
        await self._store.client.delete(hook_key(hashed))  # again: its creation may have enabled it in between
        await self._store.client.hdel(hooks_used_key(account_id), hook_id)

    async def forget_app(self, app: App) -> None:
        """Revokes all hooks of a deleted app."""
        records = await self._store.client.hvals(hooks_key(app.account))
        for record in records:
            _, hook = msgspec.json.decode(record, type=tuple[str, Hook])
            if hook.appId == app.id:
                with contextlib.suppress(NotFound):  # it was revoked meanwhile
                    await self.revoke(app.account, hook.id)

    async def find_by_token(self, token: str) -> Hook | None:
        record = await self._store.get(hook_key(digest(token)))
        return None if record is None else msgspec.json.decode(record, type=Hook)
