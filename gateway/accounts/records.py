"""The records of accounts and apps, as Redis holds them."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gateway.errors import NotFound
from gateway.ids import Time
from gateway.keys import account_key
from gateway.settings import NANO, Plan
from gateway.validation import Audience, Audiences, Branch, Claim, Command, Folder, Issuer, Path, Rate, Sealed, Url

if TYPE_CHECKING:
    from gateway.accounts.vault import Vault
    from gateway.redis.client import Store

SLUG = re.compile(r"(?!.*--)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
PREVIEW = re.compile(r".+-preview")  # `<app>-preview` is the host name of that app's previews
DOMAIN = re.compile(r"(?=.{4,253}$)(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]", re.ASCII)

# The names of branches that git accepts (git check-ref-format), of a length that file systems accept.
BRANCH = re.compile(
    r"(?![-./]|@\Z|HEAD\Z)"
    r"(?!.*(?:\.\.|//|/\.|@\{|\.lock(?:/|\Z)))"
    r"[^\x00-\x20\x7f~^:?*\[\\]{1,250}(?<![./])"
)


class _Auth(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True, omit_defaults=True):
    """Verifies an app's users: the base of the kinds."""


class JwksAuth(_Auth, frozen=True, tag="jwks"):
    # Empty: https://<app>.{apps_domain}/.well-known/jwks.json. A path, such as /jwks, is at the app's own address.
    url: Url = ""
    issuer: Issuer | None = None
    audience: Audience | Audiences | None = None
    userClaim: Claim | None = None


class SecretAuth(_Auth, frozen=True, tag="secret"):
    secret: Sealed
    issuer: Issuer | None = None
    audience: Audience | Audiences | None = None
    userClaim: Claim | None = None


class BackendAuth(_Auth, frozen=True, tag="backend"):
    url: Url  # or a path at the app's own address
    method: Literal["GET", "POST"] = "GET"
    userField: Claim | None = None


Auth = JwksAuth | SecretAuth | BackendAuth


# Of a record that leaves it out: one that names main, or an older one that names none. If the repository has no main,
# its default branch is cloned.
DEFAULT_BRANCH = "main"


class Repository(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    url: Url  # without user name and password
    branch: Branch = DEFAULT_BRANCH  # empty: the repository's default branch
    credentials: Sealed = ""  # user name and password

    def clone_url(self, vault: Vault) -> str:
        """Returns the URL with user name and password. Raises NoEncryptionKey."""
        if not self.credentials:
            return self.url
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{vault.open(self.credentials)}@{rest}"


class Build(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    command: Command = ""
    output: Folder = "dist"
    start: Command | None = None
    health: Path | None = None  # of its start command: it must answer 2xx or 3xx


class AllowedRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The requests in any 60 seconds that operators allow an app, in place of the service's limits."""

    requestsPerMinute: Rate | None = None
    userRequestsPerMinute: Rate | None = None


class AppLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """The narrower limits that the account holder sets for an app. Money is in euro per UTC day, as decimal strings."""

    dailyEuro: str | None = None
    userDailyEuro: str | None = None
    requestsPerMinute: int | None = None
    userRequestsPerMinute: int | None = None

    @functools.cached_property
    def cap(self) -> int | None:
        """The app's daily cap in nano-euro."""
        return None if self.dailyEuro is None else to_nano_euro(self.dailyEuro)

    @functools.cached_property
    def user_cap(self) -> int | None:
        """The daily cap of each of its users in nano-euro."""
        return None if self.userDailyEuro is None else to_nano_euro(self.userDailyEuro)


def to_nano_euro(euro: str) -> int:
    return int(Decimal(euro) * NANO)


class Suspension(msgspec.Struct, frozen=True):
    """An operators' suspension of an app or an account."""

    reason: str
    at: Time


class Deletion(msgspec.Struct, frozen=True, omit_defaults=True):
    """An account holder or an operator deletes an account."""

    at: Time
    deletesAt: Time  # until then, the account can be kept
    begun: bool = False  # it is too late


class ReplacedFields(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields that the manifest of a deploy replaced: they return if the deploy fails its canary."""

    deploy: str
    auth: Auth | msgspec.UnsetType = msgspec.UNSET
    build: Build | msgspec.UnsetType | None = msgspec.UNSET


class Domain(msgspec.Struct, frozen=True, omit_defaults=True):
    """A custom domain of an app. Only a verified one is served and may call inference."""

    name: str
    verified: bool = False
    proven: bool = False  # verified by its TXT record, and not by an operator


class App(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    id: str
    name: str
    account: str
    auth: Auth = JwksAuth()
    domains: tuple[Domain, ...] = ()  # the primary first
    # The primary once more, for the version before, which knows no other domain and writes no `domains`.
    customDomain: str | None = None
    customDomainVerified: bool = False
    customDomainProven: bool = False
    repository: Repository | None = None
    build: Build | None = None
    replaced: ReplacedFields | None = None  # by the last deploy with a manifest
    limits: AppLimits | None = None  # the account holder's
    allowedRates: AllowedRates | None = None  # the operators', in place of the service's
    suspension: Suspension | None = None  # of the app itself; its account may be suspended too
    createdAt: str

    def __post_init__(self) -> None:
        if self.customDomain and not self.domains:
            domain = Domain(self.customDomain, self.customDomainVerified, self.customDomainProven)
            msgspec.structs.force_setattr(self, "domains", (domain,))
        primary = self.domains[0] if self.domains else Domain("")
        for field, value in (
            ("customDomain", primary.name or None),
            ("customDomainVerified", primary.verified),
            ("customDomainProven", primary.proven),
        ):
            msgspec.structs.force_setattr(self, field, value)

    @functools.cached_property
    def account_key(self) -> str:
        return account_key(self.account)

    @functools.cached_property
    def verified_domains(self) -> tuple[str, ...]:
        """The names of the verified domains, in their order."""
        return tuple(domain.name for domain in self.domains if domain.verified)

    @functools.cached_property
    def auth_digest(self) -> bytes:
        """Identifies the app and its token verification: keys and verified tokens are cached under it.

        It changes when the app moves to another account or is created again, and when a rename changes the address of
        its keys.
        """
        url = "" if isinstance(self.auth, SecretAuth) else self.auth.url
        own = url.startswith("/") or (isinstance(self.auth, JwksAuth) and not url)
        name = self.name if own else ""
        return hashlib.sha256(msgspec.json.encode((self.id, self.account, self.createdAt, name, self.auth))).digest()


def set_fields(app: App, fields: Mapping[str, Any]) -> App:
    """Returns the app with fields that its account holder has set. A deploy that fails leaves them as they are."""
    replaced = app.replaced
    if replaced is not None:
        kept = dict.fromkeys({"auth", "build"} & fields.keys(), msgspec.UNSET)
        replaced = msgspec.structs.replace(replaced, **kept)
    return msgspec.structs.replace(app, **fields, replaced=replaced)


def replace_domains(app: App, domains: Sequence[Domain]) -> App:
    """Returns the app with these domains, the primary first."""
    return msgspec.structs.replace(app, domains=(*domains,), customDomain=None)


class Account(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    id: str
    name: str
    plan: Plan
    createdAt: str
    dailyEuro: str | None = None  # a cap in place of the plan's
    # Why nothing of the account runs. A deletion suspends too, for the version before, which knows no deletion.
    suspension: Suspension | None = None
    deletion: Deletion | None = None

    def __post_init__(self) -> None:
        if self.suspension is None:
            msgspec.structs.force_setattr(self, "suspension", self._deletion_stop)

    @property
    def _deletion_stop(self) -> Suspension | None:
        return None if self.deletion is None else Suspension("The account is being deleted.", self.deletion.at)

    @property
    def operators_suspension(self) -> Suspension | None:
        return None if self.suspension == self._deletion_stop else self.suspension

    @property
    def is_gone(self) -> bool:
        """Whether the account's deletion has begun, after its grace."""
        return self.deletion is not None and self.deletion.begun

    @functools.cached_property
    def own_cap(self) -> int | None:
        """The account's own daily cap in nano-euro, in place of the plan's."""
        return None if self.dailyEuro is None else to_nano_euro(self.dailyEuro)


def replace_deletion(account: Account, deletion: Deletion | None) -> Account:
    """Returns the account with this deletion, or without one, and with the operators' suspension."""
    return msgspec.structs.replace(account, deletion=deletion, suspension=account.operators_suspension)


async def require_present(store: Store, account_id: str) -> None:
    """Reads the account's record from Redis, after something of the account was written.

    Raises NotFound if the account is gone, or goes: the caller then removes what it has written.
    """
    text = await store.get(account_key(account_id))
    if text is None or msgspec.json.decode(text, type=Account).is_gone:
        raise NotFound("There is no such account any more.")


def find_suspension(app: App, account: Account | None) -> Suspension | None:
    """Returns the suspension of the app, or else that of its account, which may be a deletion."""
    return app.suspension or (None if account is None else account.suspension)
