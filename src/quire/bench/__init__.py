"""Measuring the engine: workload cells, the machine's ceilings, and checkpoints with random weights."""
