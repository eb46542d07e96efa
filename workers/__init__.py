"""The background workers."""

import gateway  # noqa: F401  # before other imports, because it names a Python that is too old
