"""All settings: one frozen struct, read once from the environment and a `.env` file."""

from gateway.settings.addresses import SmtpServer, split_address, split_hosts, split_smtp_url
from gateway.settings.model import NANO, PLANS, Plan, ProviderTimeouts, RateLimits, Settings
from gateway.settings.parsing import BadSettings, find_doubts, find_temporary_fault, find_unread, load, read_environment
from gateway.settings.providers import DEFAULT_PROVIDER, ProviderRate, ProviderSettings

__all__ = [
    "DEFAULT_PROVIDER",
    "NANO",
    "PLANS",
    "BadSettings",
    "Plan",
    "ProviderRate",
    "ProviderSettings",
    "ProviderTimeouts",
    "RateLimits",
    "Settings",
    "SmtpServer",
    "find_doubts",
    "find_temporary_fault",
    "find_unread",
    "load",
    "read_environment",
    "split_address",
    "split_hosts",
    "split_smtp_url",
]
