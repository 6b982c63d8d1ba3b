"""`quire route`: a router that spreads requests over several servers."""
