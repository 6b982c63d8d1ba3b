"""Load for a server of OpenAI's interface, and what its clients see of it: `quire bench serve`.

What the figures mean, all as seen by this client:

- **TTFT**, time to first token: from the moment a request is sent (a connection is opened for it first where none is
  idle, and that counts) to the first chunk that carries tokens.
- **ITL**, inter-token latency: the gaps between chunks that carry tokens. A chunk of k tokens counts k times, with a
  k-th of its gap each. k comes from the chunk's token ids or its running usage where the server sends one of them
  (`--return-token-ids` asks for ids); otherwise a chunk counts as one token.
- **E2E**: from sending to the end of the stream.
- **TPOT**, time per output token: (E2E - TTFT) / (tokens - 1), one figure a request; none for a single token.
- **Throughput**: the requests and tokens of the requests that succeeded, by the time from the first request's sending
  to the last one's end.
- **Goodput**: requests a second that met every latency target given. One that failed met none; a latency that a
  request does not have (TPOT of a single token) does not count against it.

Numbers of tokens are the server's own (`usage`); where it does not tell, chunks are counted, and the report says so.
Percentiles interpolate linearly between the two nearest values. Requests of the warm-up and those that were broken
off by Ctrl-C are not counted.
"""
