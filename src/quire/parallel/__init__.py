"""Ranks: the processes that compute one model together, how it is sharded among them, and their collectives."""
