"""Attacks one gateway process, and measures the effect on another account's app, the bystander.

By default each attack has a fifth of its size, for small machines. `HOSTILE=full` attacks with the sizes in
docs/security.md.
"""
