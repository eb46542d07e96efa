"""Checks the fields of an app's record that account holders set, through the API or in an app's manifest."""

import re
from pathlib import PurePosixPath

import msgspec

from gateway.accounts.records import BRANCH, PREVIEW, SLUG, Auth, BackendAuth, Build, JwksAuth, Repository, SecretAuth
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.errors import RequestMalformed
from gateway.outbound import addresses
from gateway.validation import Branch, SigningSecret, Url

SECRET_BYTES = 32
OWN_ADDRESS = "https://app.example.com"  # stands for the address of an app
HEALTH_PATH = re.compile(r"/(?!/)[!$-;=?-Z\[\]_a-z~]*")  # with a query, if need be


class NewSecretAuth(SecretAuth, frozen=True, tag="secret"):
    """The auth of a request, with the plain secret. The record holds it encrypted."""

    secret: SigningSecret


NewAuth = JwksAuth | NewSecretAuth | BackendAuth


class NewRepository(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The repository of a request. The record holds user name and password encrypted, and outside the URL."""

    url: Url
    branch: Branch | None = None  # None: the repository's default branch


def check_name(name: str) -> None:
    """Raises RequestMalformed unless the name is a DNS label."""
    if not SLUG.fullmatch(name):
        raise RequestMalformed(
            "name: an app's name is a DNS label: 1 to 63 of a-z, 0-9 and single hyphens, none at the ends."
        )


def check_new_name(name: str) -> None:
    """Raises RequestMalformed for a name that is reserved for previews."""
    if PREVIEW.fullmatch(name):
        raise RequestMalformed("name: names that end in -preview are addresses of previews; choose another.")


def check_repository(repository: NewRepository | None, vault: Vault, *, allow_private: bool) -> Repository | None:
    """Returns the repository to store. Raises RequestMalformed."""
    if repository is None:
        return None
    if repository.branch is not None and not BRANCH.fullmatch(repository.branch):
        raise RequestMalformed("repository.branch: git does not accept this branch name; use one such as main.")
    scheme, _, rest = repository.url.partition("://")
    authority, slash, path = rest.partition("/")
    credentials, _, host = authority.rpartition("@")
    url = f"{scheme}://{host}{slash}{path}"
    try:
        if not (allow_private and url.startswith("file:///")):
            addresses.check_url(url, allow_private=allow_private)
        sealed = vault.seal(credentials) if credentials else ""
    except (addresses.BlockedAddress, ValueError, NoEncryptionKey) as error:
        raise RequestMalformed(f"repository.url: {error}") from None
    return Repository(url, repository.branch or "", sealed)


def check_auth(auth: NewAuth, vault: Vault, *, allow_private: bool, save_internal: bool = False) -> Auth:
    """Returns the auth to store, with its secret encrypted. Raises RequestMalformed.

    With `save_internal`, an address that is not public is stored nevertheless. No call to it is made.
    """
    if isinstance(auth, NewSecretAuth):
        if len(auth.secret.encode()) < SECRET_BYTES:
            raise RequestMalformed(f"auth.secret: at least {SECRET_BYTES} bytes.")
        try:
            return SecretAuth(vault.seal(auth.secret), auth.issuer, auth.audience, auth.userClaim)
        except NoEncryptionKey as error:
            raise RequestMalformed(f"auth.secret: {error}.") from None
    if isinstance(auth, BackendAuth) or auth.url:
        if auth.url.startswith("//"):
            raise RequestMalformed("auth.url: begin a path at the app's own address with one slash.")
        url = f"{OWN_ADDRESS}{auth.url}" if auth.url.startswith("/") else auth.url
        try:
            addresses.check_url(url, allow_private=allow_private)
        except (addresses.BlockedAddress, ValueError) as error:
            if not (save_internal and addresses.is_internal(url)):
                raise RequestMalformed(f"auth.url: {error}") from None
    return auth


def check_build(build: Build | None) -> Build | None:
    """Returns the build unchanged. Raises RequestMalformed."""
    if build is None:
        return None
    output = PurePosixPath(build.output)
    if output.is_absolute() or ".." in output.parts or "\0" in build.output:
        raise RequestMalformed("build.output: name a folder inside the source, such as dist, without '..'.")
    for field, command in (("command", build.command), ("start", build.start)):
        if command is not None and "\0" in command:
            raise RequestMalformed(f"build.{field}: a command cannot contain a NUL character.")
    if build.start is not None and not build.start.strip():
        raise RequestMalformed("build.start: write a command, or leave it out to serve files.")
    if build.health is not None:
        if not HEALTH_PATH.fullmatch(build.health):
            raise RequestMalformed("build.health: write a path at the app's own address, such as /healthz.")
        if build.start is None:
            raise RequestMalformed("build.health: files have no health check; add a start command, or leave it out.")
    return build
