from tests.gateway.conftest import backend, building, gw, launch, provider, resolver, twin

__all__ = ["backend", "building", "gw", "launch", "provider", "resolver", "twin"]
