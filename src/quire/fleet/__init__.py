"""Routing of requests among several servers: pure decisions, without I/O or a clock."""
