"""The engine's decisions: what the next step computes. Pure Python, without torch, clocks, randomness or I/O."""
