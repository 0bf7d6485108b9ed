"""Ops whose recurrence is that of `wkv7` or `gla`, with operands that are made of other inputs."""
