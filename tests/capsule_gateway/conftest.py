from tests.gateway.conftest import backend, building, hosted, provider

__all__ = ["backend", "building", "hosted", "provider"]
