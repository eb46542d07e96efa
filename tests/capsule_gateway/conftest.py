from tests.gateway.conftest import backend, building, gw, hosted, launch, provider, resolver, twin

__all__ = ["backend", "building", "gw", "hosted", "launch", "provider", "resolver", "twin"]
