"""Quire: an inference engine for large language models that can be read in a day."""
