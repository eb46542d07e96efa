"""`python -m gateway.cli`, the same as `capsule`."""

from gateway.cli.main import main

main()
