"""Runs `capsule`, as `python -m capsule_gateway`."""

from capsule_gateway import main

main()
