"""Where a request goes, of several servers: pure decisions, without I/O or a clock."""
