"""What we claim on paper, measured on the attached chip: `python -m benchmarks.chip`."""
