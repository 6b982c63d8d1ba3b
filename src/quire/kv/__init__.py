"""KV blocks outside the pool: the memory and the files in which they lie."""
