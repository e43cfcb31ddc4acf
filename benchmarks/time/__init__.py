"""How long a step, and compiling it, takes."""
