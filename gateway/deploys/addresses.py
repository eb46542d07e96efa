"""The addresses at which a deploy's release is served."""

from __future__ import annotations

import hashlib
import re

from gateway.events.catalog import Kind
from gateway.settings import Settings

SLUG_LENGTH = 19
LABEL_LENGTH, DIGEST_LENGTH = 63, 8  # of a host name's label; of the digest in an app's name that is too long for it


def slug(branch: str) -> str:
    """The interface defines this rule. Branches that differ only in punctuation share a slug."""
    return re.sub(r"[^a-z0-9]+", "-", branch.lower()).strip("-")[:SLUG_LENGTH].rstrip("-") or "preview"


def host(app: str, kind: Kind, branch: str | None, domain: str) -> str:
    """A name that is too long for a preview's label is shortened, and a digest keeps it apart from others."""
    if kind == "live":
        return f"{app}.{domain}"
    suffix = "-preview" if branch is None else f"--p-{slug(branch)}"
    if len(app) + len(suffix) > LABEL_LENGTH:
        digest = hashlib.sha256(app.encode()).hexdigest()[:DIGEST_LENGTH]
        app = f"{app[: LABEL_LENGTH - len(suffix) - DIGEST_LENGTH - 1].rstrip('-')}-{digest}"
    return f"{app}{suffix}.{domain}"


def address(kind: Kind, branch: str | None) -> str:
    """Which of its app's addresses a deploy is for. The folders of releases have these names."""
    return kind if kind == "live" or branch is None else f"p-{slug(branch)}"


def url_of(name: str, settings: Settings) -> str:
    """The URL of a host name, as pages and tools show it."""
    return settings.apps_url.replace("{host}", name)


def live_url(app: str, settings: Settings) -> str:
    return url_of(host(app, "live", None, settings.apps_domain), settings)
