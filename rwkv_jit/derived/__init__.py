"""Ops whose recurrence is that of `wkv7` or `gla`, with operands that are computed from others."""
