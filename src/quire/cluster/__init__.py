"""`quire up`: starts the processes of a cluster file, watches and restarts them, and stops them together."""
