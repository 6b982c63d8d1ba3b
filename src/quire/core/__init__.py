"""Decisions: what the next step holds. Pure Python, without torch, clock, randomness or I/O."""
