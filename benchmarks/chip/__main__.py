"""`python -m benchmarks.chip`."""

from benchmarks.chip.command import main

main()
