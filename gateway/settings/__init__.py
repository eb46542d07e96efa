"""All settings: one frozen struct, read once from the environment and a `.env` file."""

from gateway.settings.addresses import split_address, split_hosts
from gateway.settings.model import NANO, PLANS, Plan, ProviderRate, ProviderTimeouts, RateLimits, Settings
from gateway.settings.parsing import BadSettings, load

__all__ = [
    "NANO",
    "PLANS",
    "BadSettings",
    "Plan",
    "ProviderRate",
    "ProviderTimeouts",
    "RateLimits",
    "Settings",
    "load",
    "split_address",
    "split_hosts",
]
