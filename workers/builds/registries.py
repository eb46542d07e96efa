"""The package registries of builds: where npm and pip find packages, whom they trust, and when they give up.

By default these are the public registries. GATEWAY_BUILD_REGISTRIES names others, which need not be at public
addresses: a build may connect to each, at its one port. A build can read the credentials in a registry's address, but
its output does not show them.
"""

import base64
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

import httpx

from gateway.deploys.states import DeployError
from workers.sandbox.network import Endpoint

# Three tries of 15 seconds and short pauses: a registry that does not answer fails the build within a minute.
BASE_ENVIRONMENT = {
    "NPM_CONFIG_FETCH_TIMEOUT": "15000",
    "NPM_CONFIG_FETCH_RETRIES": "2",
    "NPM_CONFIG_FETCH_RETRY_MINTIMEOUT": "500",
    "NPM_CONFIG_FETCH_RETRY_MAXTIMEOUT": "1000",
    "PIP_DEFAULT_TIMEOUT": "15",
    "PIP_RETRIES": "2",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
AUTHORITIES = "authorities.pem"  # in the build's folder
AUTHORITIES_VARIABLES = ("NODE_EXTRA_CA_CERTS", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


class Registries:
    def __init__(self, addresses: Mapping[str, Sequence[str]] = {}, ca_file: str = "") -> None:
        """`addresses`: by `npm` and `pip`, the address of the registry, and others that it refers to.

        `ca_file` has certificates to trust beside the public ones.
        """
        self._npm, self._pip = (urlsplit(next(iter(addresses.get(name, ())), "")) for name in ("npm", "pip"))
        every = [urlsplit(address) for registry in addresses.values() for address in registry]
        self.endpoints: list[Endpoint] = [*dict.fromkeys(map(_find_endpoint, every))]
        self.secrets = {secret: secret for parts in every for secret in _list_secrets(parts)}
        self._ca_file = ca_file

    def write_authorities(self, build: Path) -> str:
        """Writes the public authorities and the additional ones to the build's folder. Returns the file's path.

        Returns an empty string if there are no additional ones. Many tools take one file, which replaces their own.
        Raises DeployError.
        """
        if not self._ca_file:
            return ""
        context = httpx.create_ssl_context(trust_env=False)
        try:
            context.load_verify_locations(self._ca_file)
        except OSError:  # it has changed since the worker started
            raise DeployError("the worker can't read the certificates in GATEWAY_CA_FILE", service_fault=True) from None
        certificates = context.get_ca_certs(binary_form=True)
        (build / AUTHORITIES).write_text("".join(map(ssl.DER_cert_to_PEM_cert, certificates)))
        (build / AUTHORITIES).chmod(0o644)
        return str(build / AUTHORITIES)

    def make_environment(self, authorities: str) -> dict[str, str]:
        """Returns the variables of a build. `authorities` is the path that `write_authorities` returned."""
        environment = BASE_ENVIRONMENT | (dict.fromkeys(AUTHORITIES_VARIABLES, authorities) if authorities else {})
        if self._npm.hostname:
            registry = _without_credentials(self._npm).geturl()
            environment |= dict.fromkeys(("NPM_CONFIG_REGISTRY", "YARN_NPM_REGISTRY_SERVER"), registry)
        if self._pip.hostname:
            environment |= dict.fromkeys(("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), self._pip.geturl())
            if self._pip.scheme == "http":
                environment["PIP_TRUSTED_HOST"] = _without_credentials(self._pip).netloc
        return environment

    @property
    def npmrc(self) -> str:
        """The credentials for npm, which ignores those in an address when it downloads packages."""
        user, password = unquote(self._npm.username or ""), unquote(self._npm.password or "")
        if not user:
            return ""
        registry = _without_credentials(self._npm)
        key = f"//{registry.netloc}{registry.path.rstrip('/')}/:"
        return f"{key}_auth={_encode(user, password)}\n" if password else f"{key}_authToken={user}\n"


def _find_endpoint(parts: SplitResult) -> Endpoint:
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _without_credentials(parts: SplitResult) -> SplitResult:
    return parts._replace(netloc=parts.netloc.rpartition("@")[2])


def _encode(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def _list_secrets(parts: SplitResult) -> list[str]:
    """Lists the credentials of an address, in each form in which tools may print them."""
    credentials, _, _ = parts.netloc.rpartition("@")
    if not credentials:
        return []
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return [f"//{credentials}@", credentials, password or user, parts.password or "", _encode(user, password)]


PUBLIC = Registries()
