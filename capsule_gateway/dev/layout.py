"""The ports, folder and settings of `capsule dev`: five consecutive ports and one folder."""

import hashlib
import os
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from capsule_gateway.dev.identity import CLIENT_ID, OPERATOR, PATH
from capsule_gateway.dev.key_file import Keys
from gateway.storage import closed_folders

SHARED_DATA = Path("/var/lib/capsule-dev")
DRAIN_SECONDS = 5  # for running answers, after Ctrl-C
DEMO, HELLO = "demo", "hello"  # the apps of the templates: full and static
APPS_DOMAIN = "apps.localhost"


class OwnApp(NamedTuple):
    """The developer's own app, which runs outside the sandbox, in the place of the demo app."""

    name: str
    folder: Path
    command: str
    auth: dict[str, Any] | None  # of its manifest


class Layout:
    def __init__(
        self,
        port: int,
        folder: Path,
        provider_url: str | None = None,
        trust_builds: bool = False,
        own_app: OwnApp | None = None,
        https: bool = False,
    ) -> None:
        """`port` is that of the gateway.

        `provider_url` is a real provider instead of the stand-in; its key is in the environment. With `trust_builds`,
        builds and apps run without a sandbox. With `https`, Caddy serves everything, at the next port.
        """
        self.port, self.folder, self.provider_url, self.trust_builds = port, folder, provider_url, trust_builds
        self.own_app, self.https = own_app, https
        # Of all apps, the model with the provider for sign-in, the database and the developer's own app.
        self.apps_port, self.model_port, self.valkey_port, self.own_port = range(port + 1, port + 5)
        self.scheme = "https" if https else "http"
        self.local = f"http://127.0.0.1:{port}"  # of the gateway, for `capsule dev` itself
        self.gateway = f"https://localhost:{self.apps_port}" if https else f"http://localhost:{port}"
        self.issuer = f"http://localhost:{self.model_port}{PATH}"
        self.app = own_app.name if own_app else DEMO
        self.ai = f"{self.gateway}/capsule/{self.app}/ai"
        self.host = f"{self.app}.{APPS_DOMAIN}"
        self.address = f"{self.scheme}://{self.host}:{self.apps_port}"
        self.hello = f"{self.scheme}://{HELLO}.{APPS_DOMAIN}:{self.apps_port}"
        self.redis = f"redis://127.0.0.1:{self.valkey_port}/0"
        self.keys = folder / "keys.json"
        self.logs = folder / "logs"
        self.user_token = folder / "user-token"

    @property
    def data_dir(self) -> Path:
        """The folder of releases and builds. As root, builds run as other users, which must be able to reach it."""
        if os.geteuid() == 0 and closed_folders(self.folder.parent):
            return SHARED_DATA / hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]
        return self.folder

    def settings(self, keys: Keys) -> dict[str, str]:
        settings = {
            "GATEWAY_REDIS_URL": self.redis,
            "GATEWAY_BASE_URL": self.gateway,
            "GATEWAY_APPS_DOMAIN": APPS_DOMAIN,
            "GATEWAY_APPS_URL": f"{self.scheme}://{{host}}:{self.apps_port}",
            "GATEWAY_EXAMPLE_URL": "" if self.own_app else self.address,
            "GATEWAY_INFERENCE": "on",
            "GATEWAY_PROCESSING_APPROVED": "true",
            "GATEWAY_EMERGENCY_OFF_FILE": str(self.folder / "inference.off"),
            "GATEWAY_OPERATOR_TOKEN": keys.operator_token,
            "GATEWAY_OIDC_ISSUER": self.issuer,
            "GATEWAY_OIDC_CLIENT_ID": CLIENT_ID,
            "GATEWAY_OIDC_CLIENT_SECRET": keys.oidc_secret,
            "GATEWAY_OIDC_OPERATORS": OPERATOR,
            "GATEWAY_ENCRYPTION_KEY": keys.encryption_key,
            "GATEWAY_ALLOW_PRIVATE_ADDRESSES": "true",
            "GATEWAY_DATA_DIR": str(self.data_dir),
            "GATEWAY_TRUST_BUILDS": "on" if self.trust_builds else "off",
            "GATEWAY_APPS_LISTEN": f"127.0.0.1:{self.apps_port}",
            "GATEWAY_CANARY": "3",
            "GATEWAY_PROBE_URL": f"{self.scheme}://{{app}}.{{apps_domain}}:{self.apps_port}/",
            "GATEWAY_ACME": "internal" if self.https else "off",
            "GATEWAY_UPSTREAM": f"127.0.0.1:{self.port}" if self.https else "",
            "GATEWAY_DRAIN": str(DRAIN_SECONDS),
            "GATEWAY_LOG_FORMAT": "text",
            "PYTHONUNBUFFERED": "1",
        }
        if not self.provider_url:
            settings["GATEWAY_PROVIDER_URL"] = f"http://127.0.0.1:{self.model_port}/v1"
            settings["GATEWAY_PROVIDER_KEY"] = keys.provider_key
        return settings

    @property
    def curl(self) -> str:
        authority = f" --cacert {shlex.quote(str(self.root_certificate))}" if self.https else ""
        token = f"$(cat {shlex.quote(str(self.user_token))})"
        body = '{"prompt": "What is a capsule?", "stream": true}'
        headers = f"-H \"Authorization: Bearer {token}\" -H 'Content-Type: application/json'"
        return f"curl -N{authority} {self.ai} {headers} -d '{body}'"

    @property
    def root_certificate(self) -> Path:
        """The certificate of Caddy's own authority, which signs those of `https`."""
        return self.data_dir / "caddy" / "pki" / "authorities" / "local" / "root.crt"
