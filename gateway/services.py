"""Builds the parts of one gateway process."""

from typing import TypeVar

from litestar.di import NamedDependency

from gateway.accounts.app_changes import AppChanges
from gateway.accounts.changes import Changes
from gateway.accounts.custom_domains import CustomDomains
from gateway.accounts.openid import OpenId
from gateway.accounts.operators import Operators
from gateway.accounts.pacing import Pacing
from gateway.accounts.registry import Registry
from gateway.accounts.sessions import Sessions
from gateway.accounts.trail import AccountTrail
from gateway.accounts.vault import Vault
from gateway.accounts.viewers import CHANGES, FIGURES, LOGS, Viewers
from gateway.data.commands import DataCommands
from gateway.data.records import DataRecords
from gateway.deploys.actions import DeployActions
from gateway.deploys.environment import Environments
from gateway.deploys.hooks import Hooks
from gateway.deploys.logs import DeployLogs
from gateway.deploys.pod_log import PodLog
from gateway.deploys.previews import Previews
from gateway.deploys.records import DeployRecords
from gateway.deploys.runtime_log import RuntimeLog
from gateway.deploys.serving import Records
from gateway.deploys.states import Deploys
from gateway.events.notices import Notices
from gateway.events.webhooks import Webhooks
from gateway.inference.auth.users import Users
from gateway.inference.formats.endpoints import FORMATS
from gateway.inference.handler import Inference
from gateway.inference.providers import Providers
from gateway.inference.spend.admission import Admission
from gateway.inference.spend.budget import BudgetWatch
from gateway.inference.upstream import Upstream
from gateway.monitors.crashes import Crashes
from gateway.monitors.findings import Findings
from gateway.operations.apps import Apps
from gateway.operations.audit import AuditTrail
from gateway.operations.directory import Directory
from gateway.operations.leaving import Leaving
from gateway.operations.memberships import Memberships
from gateway.operations.overview import Overview, SnapshotFeed
from gateway.operations.redis_health import RedisHealth
from gateway.operations.removal import Removal
from gateway.outbound import client as outbound
from gateway.redis.client import Store
from gateway.settings import Settings
from gateway.storage import open_storage
from gateway.telemetry.counters import Counters
from gateway.telemetry.metrics import Metrics


class ProcessState:
    """Whether this process accepts requests, and what it cannot do."""

    draining = False
    warning = ""  # a sentence for operators


class Services:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.models, [each.name for each in settings.providers], FORMATS)
        self.store = Store(settings.redis_url, ca_file=settings.ca_file, replicas=settings.redis_wait)
        self.vault = Vault(settings.encryption_key)
        self.registry = Registry(self.store, self.vault)
        self.app_changes = AppChanges(self.registry)
        self.custom_domains = CustomDomains(settings, self.registry)
        self.directory = Directory(self.registry)
        self.sessions = Sessions(self.store, settings)
        self.operators = Operators(settings)
        self.pacing = Pacing()
        self.audit = AuditTrail(self.store)
        self.account_trail = AccountTrail(self.store)
        self.http = outbound.Client(
            allow_private=settings.allow_private_addresses,
            ca_file=settings.ca_file or None,
            own_domain=settings.apps_domain,
        )
        # The operator chooses these addresses, which may be private and without TLS.
        self.apps_http = outbound.Client(allow_private=True, ca_file=settings.ca_file or None, own=True)
        self.openid = OpenId(settings, self.store, self.apps_http)
        self.users = Users(settings, self.vault, self.http, self.store, self.apps_http)
        self.notices = Notices(self.store)
        self.memberships = Memberships(settings, self.registry, self.sessions, self.notices)
        self.budget = BudgetWatch(self.notices)
        self.admission = Admission(settings, self.store, self.metrics, self.budget if settings.sends_notices else None)
        self.webhooks = Webhooks(self.store, self.vault, allow_private=settings.allow_private_addresses)
        self.hooks = Hooks(settings, self.registry)
        self.storage = open_storage(settings)
        self.deploy_records = DeployRecords(settings, self.registry)
        self.deploy_logs = DeployLogs(self.store, self.storage)
        self.deploys = Deploys(settings, self.registry, self.deploy_records)
        records = Records(self.store)
        self.deploy_actions = DeployActions(records, self.deploys, self.deploy_records, Previews(self.store, records))
        self.data_records, self.data_commands = DataRecords(self.store), DataCommands(self.store)
        self.environments = Environments(self.store, self.vault)
        self.removal = Removal(
            self.app_changes,
            self.hooks,
            self.environments,
            self.data_commands,
            self.data_records,
            self.deploys,
            self.deploy_records,
        )
        self.apps = Apps(settings, self.registry, self.app_changes, self.deploy_records, self.users, self.removal)
        self.leaving = Leaving(
            self.registry,
            self.deploys,
            self.deploy_records,
            self.removal,
            self.storage,
            self.data_records,
            self.data_commands,
            settings,
        )
        on_disk = settings.apps_engine == "local"
        self.runtime_log = RuntimeLog(settings.data_dir) if on_disk else PodLog(settings.kubernetes_namespace, records)
        self.findings = Findings(settings, self.store)
        self.crashes = Crashes(self.store, self.webhooks)
        self.providers = Providers(settings, self.store, self.registry, self.metrics)
        self.availability = self.providers.availability
        self.counters = Counters(self.store, self.providers.count_streams, self.metrics.unlogged_requests.inc)
        self.upstream = Upstream(settings, self.registry, self.providers, self.metrics)
        self.inference = Inference(
            settings,
            self.registry,
            self.users,
            self.admission,
            self.upstream,
            self.availability,
            self.metrics,
            self.counters,
        )
        self.changes = Changes(self.registry, lambda: (self.availability.status(), self.availability.status_changes))
        self.change_viewers = Viewers(CHANGES, self.metrics.viewers.set)
        self.log_viewers, self.figure_viewers = Viewers(LOGS), Viewers(FIGURES)
        self.overview = Overview(settings, self.registry, self.providers, self.counters, self.metrics)
        self.feed = SnapshotFeed(self.overview)
        self.redis_health = RedisHealth(self.store, self.metrics.redis_up.set, self.metrics.clock_skew.set)
        self.process = ProcessState()


T = TypeVar("T")
Injected = NamedDependency[T]  # routes name the parts that they need: `registry: Injected[Registry]`
