"""The background workers."""

import gateway  # noqa: F401  # before other imports, because it reports a Python version that is too old
