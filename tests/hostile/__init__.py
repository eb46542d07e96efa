"""Attacks on one gateway process, and what each costs the app of somebody else.

By default each attack has a size that a small machine bears. `HOSTILE=full` gives the sizes in docs/security.md, whose
table `HOSTILE_REPORT=<file>` collects, one row per test.
"""
