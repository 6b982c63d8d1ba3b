"""Ranks: the processes that compute one model together, what each has of it, and how they gather what others have."""
