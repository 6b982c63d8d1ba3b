"""The engine as a separate process, and its messages to and from HTTP processes."""
