from tests.gateway.conftest import backend, building, gw, hosted, provider, resolver

__all__ = ["backend", "building", "gw", "hosted", "provider", "resolver"]
