"""The pool of connections to the provider."""

from gateway.inference.provider.pool import Provider
from gateway.settings import Settings
from tests.fakes import FakeProvider


async def test_the_number_of_idle_connections_is_limited() -> None:
    """After a burst, connections beyond the limit are closed. The next request uses the most recently used one."""
    async with FakeProvider() as fake:
        settings = Settings(provider_url=fake.url, provider_key=fake.key)
        provider = Provider(settings, settings.providers[0], max_idle=2)
        burst = [await provider.connect() for _ in range(3)]
        for connection in burst:
            provider.keep(connection)
        assert [connection.is_usable() for connection in burst] == [True, True, False]
        assert [await provider.connect() for _ in range(2)] == [burst[1], burst[0]]
        provider.close()
