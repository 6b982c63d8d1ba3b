"""KV blocks outside the pool: host memory, files, and other engines."""
