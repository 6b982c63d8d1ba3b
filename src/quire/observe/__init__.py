"""Watching an engine: the live view's data, and timelines of steps."""
