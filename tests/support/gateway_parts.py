"""A gateway's parts without its server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.services import Services
from gateway.settings import Settings
from tests.support.background import cancel


@asynccontextmanager
async def open_gateway(url: str) -> AsyncIterator[Services]:
    settings = Settings(redis_url=url, inference=True, processing_approved=True, provider_key="key")
    gateway = Services(settings)
    following = asyncio.create_task(gateway.registry.cache.follow_changes())
    await gateway.availability.reload()
    try:
        yield gateway
    finally:
        await cancel(following)
        await gateway.http.close()
        await gateway.store.close()
