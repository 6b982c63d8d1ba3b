"""The server: the engine behind OpenAI's HTTP interface."""
