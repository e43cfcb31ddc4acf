"""The update inside the backward pass."""

from optax_offload._backward.fuse_backward import fuse_backward

__all__ = ["fuse_backward"]
