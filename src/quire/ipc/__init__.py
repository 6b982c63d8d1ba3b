"""An engine in a process of its own, and how HTTP processes talk with it."""
