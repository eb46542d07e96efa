"""The addresses at which a deploy's release is served."""

import hashlib
import re
from typing import Annotated

import msgspec

from gateway.accounts.records import App
from gateway.events.catalog import Kind
from gateway.settings import Settings
from gateway.validation import declare_pattern

BRANCH_LENGTH = 250  # characters
# No option for git, and no control characters. With other invalid names, the deploy fails.
BRANCH = declare_pattern(
    r"^(?![\s\S]*[\x00-\x1f\x7f])[^-]", "must be the name of a branch, such as feature/login, and not begin with -"
)
Branch = Annotated[str, msgspec.Meta(max_length=BRANCH_LENGTH, pattern=BRANCH)]
SLUG_LENGTH = 19
LABEL_LENGTH = 63  # of a host name's label
SHORTENED = (
    "--"  # stands before the digest of a shortened name. No app's name contains it, so no app can take the address
)
DIGEST_LENGTH = 16  # of that digest: 64 bits


def slug(branch: str) -> str:
    """Returns the branch's part of a preview's address. Branches that differ only in punctuation share a slug."""
    return re.sub(r"[^a-z0-9]+", "-", branch.lower()).strip("-")[:SLUG_LENGTH].rstrip("-") or "preview"


def host(app: str, kind: Kind, branch: str | None, domain: str) -> str:
    """Returns a host name. An app's name that is too long for a preview's label is shortened, and gets a digest."""
    if kind == "live":
        return f"{app}.{domain}"
    suffix = "-preview" if branch is None else f"--p-{slug(branch)}"
    if len(app) + len(suffix) > LABEL_LENGTH:
        suffix = f"{SHORTENED}{hashlib.sha256(app.encode()).hexdigest()[:DIGEST_LENGTH]}{suffix}"
        app = app[: LABEL_LENGTH - len(suffix)].rstrip("-")
    return f"{app}{suffix}.{domain}"


def address(kind: Kind, branch: str | None) -> str:
    """Returns which of its app's addresses a deploy is for. The folders of releases have these names."""
    return kind if kind == "live" or branch is None else f"p-{slug(branch)}"


def host_of(app: App, address: str, domain: str) -> str:
    """Returns the service's own host name of an app's address. `domain` may have a port."""
    if address == "live":
        return host(app.name, "live", None, domain)
    branch = address.removeprefix("p-") if address.startswith("p-") else None
    return host(app.name, "preview", branch, domain)


def hosts_of(app: App, address: str, domain: str) -> dict[str, str]:
    """Returns the host names of an app's address, each with the one to which it redirects, or ''.

    The domains of an app redirect to the primary, once it is verified. The service's own name redirects to none.
    `domain`: of the apps, without a port, since requests are told apart by their host alone.
    """
    hosts = {host_of(app, address, domain): ""}
    if address != "live":
        return hosts
    # A name below the apps' domain may belong to another app.
    custom = [name for name in app.verified_domains if not name.endswith(f".{domain}")]
    primary = app.domains[0].name if app.domains else ""
    return hosts | {name: primary if primary in custom and name != primary else "" for name in custom}


def url_of(name: str, settings: Settings) -> str:
    """Returns the URL of a host name, as pages and tools show it."""
    return settings.apps_url.replace("{host}", name)


def address_url(app: str, kind: Kind, branch: str | None, settings: Settings) -> str:
    """Returns the URL of an app's address."""
    return url_of(host(app, kind, branch, settings.apps_domain), settings)


def live_url(app: str, settings: Settings) -> str:
    return address_url(app, "live", None, settings)
