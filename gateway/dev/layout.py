"""The ports, folder and settings of `capsule dev`: five consecutive ports and one folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from gateway.dev.keys import Keys
from gateway.storage import closed_folders

SHARED_DATA = Path("/var/lib/capsule-dev")
DRAIN_SECONDS = 5  # for running answers, after Ctrl-C


class Layout:
    def __init__(self, port: int, folder: Path, provider_url: str | None = None, trust_builds: bool = False) -> None:
        """`port` is that of the gateway.

        `provider_url` is a real provider instead of the stand-in; its key is in the environment. With `trust_builds`,
        builds and apps run without a sandbox.
        """
        self.port, self.folder, self.provider_url, self.trust_builds = port, folder, provider_url, trust_builds
        # Of all apps' pages, the model, the database and hosted apps.
        self.demo_port, self.model_port, self.valkey_port, self.apps_port = range(port + 1, port + 5)
        self.gateway = f"http://localhost:{port}"
        self.ai = f"{self.gateway}/capsule/demo/ai"
        self.demo = f"http://demo.apps.localhost:{self.demo_port}"
        self.hello = f"http://hello.apps.localhost:{self.demo_port}"
        self.hosted = f"http://127.0.0.1:{self.apps_port}"  # at which the workers serve the releases of all apps
        # An IP address, because resolvers, unlike browsers, do not know names under localhost.
        self.jwks = f"http://127.0.0.1:{self.demo_port}/.well-known/jwks.json"
        self.redis = f"redis://127.0.0.1:{self.valkey_port}/0"
        self.keys = folder / "keys.json"
        self.logs = folder / "logs"

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
            "GATEWAY_APPS_DOMAIN": "apps.localhost",
            "GATEWAY_APPS_URL": f"http://{{host}}:{self.demo_port}",
            "GATEWAY_INFERENCE": "on",
            "GATEWAY_PROCESSING_APPROVED": "true",
            "GATEWAY_EMERGENCY_OFF_FILE": str(self.folder / "inference.off"),
            "GATEWAY_OPERATOR_TOKEN": keys.operator_token,
            "GATEWAY_ENCRYPTION_KEY": keys.encryption_key,
            "GATEWAY_ALLOW_PRIVATE_ADDRESSES": "true",
            "GATEWAY_DATA_DIR": str(self.data_dir),
            "GATEWAY_TRUST_BUILDS": "on" if self.trust_builds else "off",
            "GATEWAY_APPS_LISTEN": f"127.0.0.1:{self.apps_port}",
            "GATEWAY_CANARY": "3",
            "GATEWAY_PROBE_URL": f"http://{{app}}.{{apps_domain}}:{self.demo_port}/",
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
        token = f"$(curl -sX POST -H Accept:text/plain http://localhost:{self.demo_port}/session)"
        body = '{"prompt": "What is a capsule?", "stream": true}'
        return f"curl -N {self.ai} -H \"Authorization: Bearer {token}\" -H 'Content-Type: application/json' -d '{body}'"
