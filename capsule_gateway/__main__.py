"""`python -m capsule_gateway`, the same as `capsule`."""

from capsule_gateway import main

main()
