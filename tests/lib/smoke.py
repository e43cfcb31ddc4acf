"""What an installed wheel does where its core dependencies are all that there is.

`tests/lib/package.py` runs it with a fresh environment's Python, outside of the
repository: `python -I smoke.py VERSION`.
"""

import os
import pathlib
import sys
import time
from importlib import metadata, resources, util
from typing import Any


def seconds_to_import(name: str) -> float:
    """Imports a module, and returns the wall time that it took, in seconds."""
    start = time.perf_counter()
    __import__(name)
    return time.perf_counter() - start


def packages() -> set[str]:
    """The names of the packages that are imported, but for Python's own."""
    names = {name.partition(".")[0] for name in sys.modules}
    return {n for n in names if n not in sys.stdlib_module_names and n[0] != "_"}


OTHERS_SECONDS = seconds_to_import("jax") + seconds_to_import("optax")
OTHERS = packages()
OWN_SECONDS = seconds_to_import("optax_offload")
PULLED_IN = packages() - OTHERS - {"optax_offload"}

# After what is timed.
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import optax_offload as oo  # noqa: E402


def train(tx: optax.GradientTransformation) -> tuple[Any, Any]:
    """Returns parameters and state after three steps, jitted by `oo.jit`."""
    device = jax.devices()[0]
    params = {"w": jnp.linspace(-1.0, 1.0, 512 * 256).reshape(512, 256)}
    params = jax.device_put({**params, "b": jnp.zeros(256)}, device)
    state = tx.init(params)
    x = jnp.ones((4, 512))

    def loss_fn(params):
        return jnp.mean((x @ params["w"] + params["b"]) ** 2)

    def step(params, state):
        updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
        return optax.apply_updates(params, updates), state

    step = oo.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        params, state = step(params, state)
    return params, state


def kinds(tree: object) -> set[str | None]:
    """The memory kinds of the leaves of a tree."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def main() -> None:
    """Trains for three steps each way, and says what importing costs."""
    version = sys.argv[1]
    assert oo.__version__ == metadata.version("optax-offload") == version
    assert resources.files(oo).joinpath("py.typed").is_file()
    assembler = pathlib.Path(oo.__file__).parent / "aot" / "assembler" / "bin" / "ptxas"
    assert os.access(assembler, os.X_OK), assembler
    assert not PULLED_IN, PULLED_IN
    for extra in ("flax", "matplotlib", "orbax", "tensorstore", "typer"):
        assert util.find_spec(extra) is None, f"{extra} is installed: not a bare wheel"

    plain, _ = train(optax.adam(1e-2))
    rules = r".*/(mu|nu)/.*"
    offloaded, state = train(oo.offload(optax.adam(1e-2), rules))
    for name in plain:
        np.testing.assert_allclose(plain[name], offloaded[name], rtol=1e-6, atol=1e-6)
    assert kinds(offloaded) == {"device"}
    oo.memory_report(state, rules).check()
    assert "pinned_host" in kinds(state)

    low, state = train(oo.low_bit(optax.adam(1e-2), rules))
    moment_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert moment_bytes < 0.6 * low["w"].nbytes, "two moments of 8 bits each"
    assert np.isfinite(low["w"]).all()

    print(
        f"optax_offload {version} on Python {sys.version.split()[0]}, JAX "
        f"{jax.__version__}: imported in {OWN_SECONDS:.2f} s after jax and optax "
        f"({OTHERS_SECONDS:.2f} s), and nothing else with it"
    )


if __name__ == "__main__":
    main()
