"""`quire route`: one door for several servers."""
