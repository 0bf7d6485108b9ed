"""A repository for Hugging Face's `kernels`, which reads metadata.json and asks for `layers`."""

from rwkv_jit.compat.hf_kernels import layers

__all__ = ["layers"]
