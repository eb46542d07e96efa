"""Backups of the whole service, and how they are restored."""
