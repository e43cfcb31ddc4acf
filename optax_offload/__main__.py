"""The command `optax-offload`, as `python -m optax_offload`.

It needs the extra `cli`; without it, the command says so and exits with 1.
"""

from optax_offload.cli import main

if __name__ == "__main__":
    main()
