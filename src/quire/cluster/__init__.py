"""`quire up`: the processes of a cluster file, started, watched, started again, and ended together."""
