"""What all else stands on: leaves, units, messages, versions of JAX, Flax's objects."""
