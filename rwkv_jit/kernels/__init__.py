"""The kernel service: templates, NVRTC, the cache, launches. It knows no op and imports no torch."""

__version__ = "0.1.0"
