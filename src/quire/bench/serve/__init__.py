"""`quire bench serve`: a load generator for OpenAI-compatible servers, and the latencies that clients see.

What the figures mean, all as seen by this client:

- **TTFT**, time to first token: from the moment a request is sent (including opening a connection if none is idle) to
  the first chunk with tokens.
- **ITL**, inter-token latency: the gaps between chunks with tokens. A chunk of k tokens counts k times, with 1/k of its
  gap each. k comes from the chunk's token ids or its running usage, if the server sends one of them
  (`--return-token-ids` requests ids); otherwise a chunk counts as one token.
- **E2E**: from sending a request to the end of its stream.
- **TPOT**, time per output token: (E2E - TTFT) / (tokens - 1), one value per request; none for a single token.
- **Throughput**: requests and tokens of successful requests, divided by the time from sending the first request to the
  end of the last one.
- **Goodput**: requests per second that met every latency target given. A failed request met none; a latency that a
  request does not have (TPOT of a single token) does not count against it.

Numbers of tokens are the server's (`usage`); without that, chunks are counted, and the report says so. Percentiles
interpolate linearly between the two nearest values. Warm-up requests and those interrupted by Ctrl-C are not counted.
"""
