"""The settings of a process, as one frozen struct."""

from typing import Literal, get_args

import msgspec

from gateway.settings.prices import TARIFFS, Tariff
from gateway.settings.providers import ProviderRate, ProviderSettings, all_of

NANO = 1_000_000_000  # nano-euro in a euro: money is counted in whole nano-euro
Plan = Literal["free", "starter", "maker", "max"]
PLANS: tuple[Plan, ...] = get_args(Plan)


class RateLimits(msgspec.Struct, frozen=True):
    app: int = 30
    user: int = 20


class ProviderTimeouts(msgspec.Struct, frozen=True):
    """Time limits of a request to the provider, in seconds."""

    connect: float = 5
    first: float = 30
    idle: float = 30
    total: float = 300


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    redis_url: str = "redis://localhost:6379/0"
    redis_wait: int = 0  # replicas that must confirm a reservation before its request is sent
    base_url: str = "http://localhost:8000"  # {base_url}: the public address of inference and the API
    api_url: str = ""  # {api_url}: the address in deploy hook URLs; empty: the base URL
    apps_domain: str = "apps.localhost"  # {apps_domain}
    apps_url: str = "https://{host}"  # the address of an app in pages and tools
    example_url: str = ""  # of an app that the public page links to; empty: no link

    inference: bool = False  # the default of the runtime switch
    provider_url: str = "https://api.scaleway.ai/v1"
    provider_key: str = ""  # the first gate: without a key, inference is off
    provider_key_file: str = ""  # replaces provider_key; read again when the provider rejects the key
    processing_approved: bool = False  # the second gate: the default of the approval
    emergency_off_file: str = "/run/capsule/inference.off"  # if this file exists, inference is off
    provider_timeouts: ProviderTimeouts = ProviderTimeouts()

    provider_concurrency: int = 100  # concurrent requests at the provider, of all gateways together; 0: no limit
    provider_wait: float = 10  # seconds that a request may wait for a permit; 0: no request waits
    provider_weights: dict[str, float] = msgspec.field(  # weights of accounts by plan while requests wait
        default_factory=lambda: dict.fromkeys(PLANS, 1.0)
    )
    provider_rate: ProviderRate | None = None  # the provider's quota of requests and tokens per minute
    # The providers in the TOML file that the variable names, the preferred one first; empty: the one of provider_*.
    providers_file: tuple[ProviderSettings, ...] = ()
    # Those of the TOML file that the variable names, in the order of time; empty: those of the service.
    prices_file: tuple[Tariff, ...] = ()
    regions: tuple[str, ...] = ("fr-par",)  # where providers may process prompts

    operator_token: str = ""  # shared by operators; without any token, the platform API is closed
    operator_tokens: dict[str, str] = msgspec.field(default_factory=dict)  # by name of the operator
    oidc_issuer: str = ""  # of the OpenID provider with which people sign in; empty: they use API keys
    oidc_client_id: str = ""
    oidc_client_secret: str = ""
    oidc_client_secret_file: str = ""  # replaces oidc_client_secret; read at each sign-in
    oidc_trust_email: bool = False  # addresses count as verified if the provider does not say whether they are
    oidc_operators: tuple[str, ...] = ()  # who may use /ops: e-mail addresses, and claims as `claim=value`
    allow_private_addresses: bool = False  # for development and tests: loopback, plain HTTP
    encryption_key: str = ""  # or several, separated by commas: the first encrypts, all decrypt
    ca_file: str = ""  # certificates to trust for outgoing TLS, beside the public ones

    registrations_per_day: int = 50  # of accounts; with sign-in, at least half of them are kept for it
    account_grace: int = 30  # days until an account is deleted, in which its holder can keep it; 0: at once
    deploy_quotas: dict[str, int] = msgspec.field(  # deploys per account and UTC day
        default_factory=lambda: {"free": 10, "starter": 50, "maker": 200, "max": 1000}
    )
    previews: dict[str, int] = msgspec.field(  # addresses of an account's previews
        default_factory=lambda: {"free": 2, "starter": 5, "maker": 10, "max": 25}
    )
    app_limits: dict[str, int] = msgspec.field(  # apps that an account may create itself
        default_factory=lambda: {"free": 1, "starter": 3, "maker": 10, "max": 50}
    )
    rate_limits: RateLimits = RateLimits()  # requests per 60 seconds
    daily_caps: dict[str, int] = msgspec.field(  # nano-euro per account and UTC day; the variable is in euro
        default_factory=lambda: {
            "free": NANO // 20,
            "starter": NANO // 2,
            "maker": 2 * NANO,
            "max": 10 * NANO,
        }
    )
    keep_alive: float = 15  # seconds without an event before a keep-alive
    drain: float = 30  # seconds that running streams get after SIGTERM

    probe_interval: float = 60  # seconds between uptime probes of an app
    probe_timeout: float = 10  # seconds
    probe_url: str = "https://{app}.{apps_domain}/"
    probe_check_url: str = ""  # an address that responds if the worker has a network; empty: no check
    unhealthy_cooldown: float = 900  # seconds between two events about an unhealthy app
    certificate_interval: float = 86_400  # seconds between two checks of a certificate
    certificate_address: str = ""  # host:port to connect to instead of the custom domain
    dns: str = ""  # address:port,… of the resolvers asked about custom domains; empty: those of the system
    acme: str = ""  # the directory's URL, or `internal` for an authority of our own; empty: no certificates
    finding_deadlines: dict[str, int] = msgspec.field(  # days from the first scan that reports it
        default_factory=lambda: {"red": 7, "yellow": 30}
    )
    smtp_url: str = ""  # smtp:// or smtps://, of the mail server that sends notices; empty: none are sent
    smtp_url_file: str = ""  # replaces smtp_url; read again for each message
    mail_from: str = ""  # the sender of notices: an address, or `Name <address>`
    webhook_claim_idle: float = 15  # seconds after which another worker may claim an event
    deploy_engine: str = "local"
    apps_engine: str = "local"  # what serves the apps that the workers have built: hosts, or `kubernetes`
    kubernetes_namespace: str = "capsule-apps"  # of the apps; nothing else in it is touched
    kubernetes_image: str = "capsule-builder"  # of the pods: the builder's image
    kubernetes_ingress_class: str = ""  # empty: the cluster's default one, as for the next two
    kubernetes_storage_class: str = ""
    kubernetes_runtime_class: str = ""  # for another isolation, such as gVisor's or Kata's
    kubernetes_ingress_namespace: str = ""  # of the ingress controller, which may ask the apps; empty: all may
    kubernetes_exclude: tuple[str, ...] = ()  # public networks in CIDR that apps must not reach, such as the nodes' own
    kubernetes_tls_issuer: str = ""  # cert-manager's ClusterIssuer for the apps' host names; empty: no certificates
    kubernetes_ingress_annotations: dict[str, str] = {}
    canary: float = 30  # seconds that a canary is checked
    data_dir: str = "./.capsule"
    storage_url: str = ""  # file:///… or s3://bucket/prefix, with the variables AWS_*; empty: the data folder
    # By npm and pip: the registry's address, and others that it refers to. Empty: the public ones.
    build_registries: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    trust_builds: bool = False  # for development: builds and start commands run without a sandbox
    account_disk: int = 10_240  # MiB for the releases of an account
    build_cache: int = 512  # MiB for the cache of an app's builds, on each builder; 0: nothing is kept
    app_sleep: dict[str, float] = msgspec.field(  # seconds without a request, by plan; other plans never sleep
        default_factory=lambda: {"free": 900.0}
    )
    app_pods: dict[str, int] = msgspec.field(  # addresses of an account with pods at the same time, on Kubernetes
        default_factory=lambda: {"free": 3, "starter": 8, "maker": 20, "max": 75}
    )
    app_data: dict[str, int] = msgspec.field(  # MiB for the data of an app, by plan
        default_factory=lambda: {"free": 256, "starter": 1_024, "maker": 4_096, "max": 16_384}
    )
    apps_listen: str = "127.0.0.1:8080"  # host:port where the worker `sites` serves the hosted apps
    trusted_proxies: str = "private"  # or networks in CIDR, or "off": in front of Caddy, if it gets no certificates
    keep_serving: bool = True  # whether Caddy keeps serving when the worker `sites` is stopped
    upstream: str = ""  # host:port or unix/path of the gateway, if Caddy serves the API and the pages too

    log_level: str = "info"
    log_format: str = "json"

    @property
    def providers(self) -> tuple[ProviderSettings, ...]:
        """All providers, the preferred one first."""
        return self.providers_file or (
            ProviderSettings(
                url=self.provider_url,
                region=self.regions[0],
                key=self.provider_key,
                key_file=self.provider_key_file,
                concurrency=self.provider_concurrency,
                rate=self.provider_rate,
                models=all_of(self.tariffs[0].prices),
            ),
        )

    @property
    def tariffs(self) -> tuple[Tariff, ...]:
        """The prices of all models over time."""
        return self.prices_file or TARIFFS

    @property
    def sends_notices(self) -> bool:
        """Returns whether notices are sent by e-mail."""
        return bool(self.smtp_url or self.smtp_url_file)

    @property
    def anonymous_registrations_per_day(self) -> int:
        """Returns how many of a day's registrations may be made without a sign-in.

        Otherwise a few strangers could use up the registrations of everybody whom the identity provider knows.
        """
        return self.registrations_per_day // 2 if self.oidc_issuer else self.registrations_per_day

    @property
    def models(self) -> tuple[str, ...]:
        """The models that at least one provider serves."""
        served = {model for each in self.providers for model in each.models}
        return tuple(model for model in self.tariffs[0].prices if model in served)
