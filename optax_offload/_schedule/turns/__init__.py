"""The turns of layers that no scan runs: how a step is cut, and what each does."""
