"""How much device and host memory is needed."""
