"""Whole states for tests: every sort of leaf, and what has to come back of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_offload as oo
from optax_offload._states import records


def on_device(x):
    """The array, committed to the first device."""
    return jax.device_put(x, jax.devices()[0])


def make_tree():
    """Every sort of leaf, fresh arrays each time."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, P("x"))
    return {
        "bfloat16": on_device(jnp.arange(6, dtype=jnp.bfloat16)),
        "bool": on_device(jnp.array([True, False])),
        "complex": on_device(jnp.array([1 + 2j, -0.0])),
        "empty": on_device(jnp.zeros((0, 3))),
        "float8": on_device(jnp.arange(4.0).astype(jnp.float8_e4m3fn)),
        "int4": on_device(jnp.arange(4).astype(jnp.int4)),
        "key": on_device(jax.random.key(5)),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 8), sharded),
        "nan": on_device(jnp.array([np.nan, -0.0, np.inf])),
        "none": None,
        "number": 3,
        "numpy": np.ones(2),
        "replicated": jax.device_put(jnp.ones(3), NamedSharding(mesh, P())),
        "sharded": jax.device_put(jnp.arange(32.0).reshape(8, 4), sharded),
        "uncommitted": jnp.ones(3),
        "weak": on_device(jnp.asarray(7)),
    }


def what(tree):
    """All that has to come back: dtypes, shapes, bits, weak types, shardings."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return bits(arrays), [(jax.typeof(x), str(x.sharding)) for x in arrays]


def kinds(tree):
    """The memory kind of each leaf, by its path."""
    return {row.path: row.actual for row in oo.memory_report(tree).rows}


def there_and_back(tree, donate, block, **options):
    """A state that has been moved, and was brought back as it was."""
    before, at_home, kind = what(tree), kinds(tree), options["memory_kind"]
    there = oo.offload_states(tree, donate=donate, block=block, **options)
    assert set(kinds(there).values()) == {kind, None}
    records.settle()
    for name, x in tree.items():
        if isinstance(x, jax.Array) and (x.size or kind == "disk"):
            assert x.is_deleted() == donate, name
    back = oo.reload_states(there, donate=donate, block=block)
    assert what(back) == before
    assert kinds(back) == at_home
    records.settle()
    return there


def steps(cycle, donate=True, count=12):
    """Losses of a training, the state taken through ``cycle`` before each step."""
    tx = oo.offload(optax.adam(1e-2), oo.Rule(".*/nu/.*", min_bytes=0))
    params = {"w": on_device(jnp.linspace(-1, 1, 64 * 64).reshape(64, 64))}
    state = (params, tx.init(params))

    @functools.partial(jax.jit, donate_argnums=0 if donate else ())
    def step(state):
        params, opt = state
        loss, grads = jax.value_and_grad(
            lambda p: jnp.mean(jnp.cos(p["w"] @ p["w"]) ** 2)
        )(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    losses = []
    for _ in range(count):
        state = cycle(state)
        state, loss = step(state)
        losses.append(np.asarray(loss).tobytes())
    return losses, step._cache_size()


def template_of(tree):
    """Structs as `eval_shape` makes them; what is no array as it is."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(
                x.shape,
                x.dtype,
                sharding=x.sharding,
                weak_type=bool(getattr(x, "weak_type", False)),
            )
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )


def files(directory):
    """All files in a directory."""
    return sorted(p for p in directory.rglob("*") if p.is_file())
