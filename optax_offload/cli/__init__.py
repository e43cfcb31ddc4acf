"""`optax-offload`, the command."""

from optax_offload.cli.command import main

__all__ = ["main"]
