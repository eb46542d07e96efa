"""The command line."""

import gateway  # noqa: F401  # checks the version of Python
