"""Fakes of the systems around the gateway, served over real sockets: the provider and app backends."""

from tests.fakes.backend import FakeAppBackend
from tests.fakes.provider import FakeProvider

__all__ = ["FakeAppBackend", "FakeProvider"]
