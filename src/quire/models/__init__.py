"""Architectures, one file each, and the way from a checkpoint on disk to a loaded model."""
