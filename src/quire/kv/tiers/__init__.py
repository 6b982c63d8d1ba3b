"""Tiers of KV below the pool, and other engines: what is where, what is worth it, and what comes of it. It is decided
here, and carried out in `kv`.
"""
