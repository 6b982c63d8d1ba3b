"""All that needs a GPU: parity, determinism, and the workloads of `benchmarks/gpu.md`. See `__main__`."""
