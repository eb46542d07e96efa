"""The ASGI service."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # running from the source has no other check
    sys.exit(
        f"Capsule Gateway needs Python 3.11 or newer; this is {sys.version.split()[0]}. Start it with a newer version."
    )
