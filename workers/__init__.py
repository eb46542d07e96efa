"""The background workers."""
