"""The ASGI service."""
