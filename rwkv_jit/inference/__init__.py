"""Inference: steps of a few tokens over a pool of states."""
