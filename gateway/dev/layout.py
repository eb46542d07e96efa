"""The ports, folder and settings of `capsule dev`: five consecutive ports and one folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from gateway.dev.keys import Keys
from gateway.storage import closed_folders

SHARED_DATA = Path("/var/lib/capsule-dev")
DRAIN_SECONDS = 5  # for running answers, after Ctrl-C


class Layout(msgspec.Struct, frozen=True):
    port: int  # of the gateway; the next ports serve all apps' pages, the model, the database and hosted apps
    folder: Path
    provider_url: str | None = None  # of a real provider instead of the stand-in; its key is in the environment
    trust_builds: bool = False  # builds and apps run without a sandbox

    @property
    def demo_port(self) -> int:
        return self.port + 1

    @property
    def model_port(self) -> int:
        return self.port + 2

    @property
    def valkey_port(self) -> int:
        return self.port + 3

    @property
    def apps_port(self) -> int:
        return self.port + 4

    @property
    def hello(self) -> str:
        return f"http://hello.apps.localhost:{self.demo_port}"

    @property
    def hosted(self) -> str:
        """The address at which the workers serve the releases of all apps."""
        return f"http://127.0.0.1:{self.apps_port}"

    @property
    def gateway(self) -> str:
        return f"http://localhost:{self.port}"

    @property
    def ai(self) -> str:
        return f"{self.gateway}/capsule/demo/ai"

    @property
    def demo(self) -> str:
        return f"http://demo.apps.localhost:{self.demo_port}"

    @property
    def jwks(self) -> str:
        # An IP address, because resolvers, unlike browsers, do not know names under localhost.
        return f"http://127.0.0.1:{self.demo_port}/.well-known/jwks.json"

    @property
    def redis(self) -> str:
        return f"redis://127.0.0.1:{self.valkey_port}/0"

    @property
    def keys(self) -> Path:
        return self.folder / "keys.json"

    @property
    def data_dir(self) -> Path:
        """The folder of releases and builds. As root, builds run as other users, which must be able to reach it."""
        if os.geteuid() == 0 and closed_folders(self.folder.parent):
            return SHARED_DATA / hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]
        return self.folder

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

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
            "GATEWAY_APPS_SERVER": "embedded",
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
