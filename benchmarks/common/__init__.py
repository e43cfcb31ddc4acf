"""What the benchmarks share: workloads, steps, spans of time."""
