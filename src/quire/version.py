"""The version, which engines of a cluster compare."""

__version__ = "0.1.0"
