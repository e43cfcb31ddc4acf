"""What is claimed on paper, measured on a chip: `python -m benchmarks.chip`."""
