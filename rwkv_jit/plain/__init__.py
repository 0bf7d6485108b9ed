"""Definitions in plain torch."""
