"""Kernels before the first call."""
