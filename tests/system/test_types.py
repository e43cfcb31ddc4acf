# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""What a type checker knows of users' code: pyright fails where it knows less.

Each function runs too. A comment that ignores an error is itself an error where pyright
finds none, so that wrong uses are known to be found.
"""

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_offload as oo

X = jnp.ones(3)


def step(x: jax.Array, scale: float = 2.0) -> tuple[jax.Array, float]:
    """A step with a default, and two results."""
    return x * scale, scale


def test_jit_keeps_the_signature():
    """As a call, and as a decorator with options and without."""
    jitted = oo.jit(step, donate_argnames=())
    assert_type(jitted(X, scale=1.0), tuple[jax.Array, float])
    assert_type(jitted.lower(X), jax.stages.Lowered)
    assert_type(jitted.trace(X), jax.stages.Traced)
    _ = str(jitted.schedule(jax.ShapeDtypeStruct((3,), jnp.float32)))

    @oo.jit
    def bare(x: jax.Array) -> jax.Array:
        return x + 1

    @oo.jit(late_gradients="recompute", static_argnames="n")
    def decorated(x: jax.Array, n: int) -> jax.Array:
        return x * n

    assert_type(bare(X), jax.Array)
    assert_type(decorated(X, n=2), jax.Array)
    with pytest.raises(TypeError, match="'m'"):
        decorated(X, m=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="late_gradients is 'both'; it must be one of"):
        oo.jit(step, late_gradients="both")  # pyright: ignore


def test_jit_spells_its_arguments():
    """Those of `jax.jit` too; others are found before it runs."""
    oo.jit(step, static_argnames="scale", keep_unused=True, compiler_options={})
    with pytest.raises(TypeError, match="residual"):
        oo.jit(step, residual="host")  # pyright: ignore[reportCallIssue]


def test_results_have_names():
    """What public functions return can be written down."""
    tx: oo.Offloaded = oo.offload(optax.adam(1.0))
    schedule: oo.Schedule = tx.schedule({"w": X})
    jitted: oo.Jitted[..., tuple[jax.Array, float]] = oo.jit(step)
    fused: oo.FusedStep = jitted.schedule(X)
    options: oo.Options = oo.OffloadConfig([oo.Rule("a")]).step
    assert all(map(str, (schedule, fused, options)))
    assert_type(oo.eval_shape(step, X), tuple[jax.Array, float])


def test_offload_takes_transformations():
    """One of optax, `MultiSteps`, or one of one's own; not what makes one."""
    multi = optax.MultiSteps(optax.adam(1.0), 2)
    for inner in (
        optax.adam(1.0),
        multi,
        optax.GradientTransformation(*optax.sgd(1.0)),
    ):
        assert oo.offload(inner)
    with pytest.raises(TypeError, match="Call it first"):
        oo.offload(optax.adamw)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Pass the transformation"):
        oo.offload("adam")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Call it first"):
        oo.low_bit(optax.adamw, ".*")  # pyright: ignore[reportArgumentType]


def test_stream_keeps_the_signature():
    """It is a function like the step."""
    fused = oo.stream(step, late_gradients="host")
    assert_type(fused(X), tuple[jax.Array, float])
    takes: Callable[[jax.Array], tuple[jax.Array, float]] = fused
    del takes


def test_trees_keep_their_type():
    """What moves a tree returns such a tree."""
    tree = {"w": X}
    assert_type(oo.set_memory_kind(tree, "w", "pinned_host"), dict[str, jax.Array])
    assert_type(oo.offload_states(tree, donate=False), dict[str, jax.Array])
    assert_type(oo.place(tree, oo.Rule("w", min_bytes=0)), dict[str, jax.Array])


def test_names_are_literals():
    """A wrong one is found before it runs, and still when it runs."""
    with pytest.raises(ValueError, match="memory_kind is 'host'; it must be 'pinned"):
        oo.Rule(".*", "host")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="codec is 'int4'; it must be one of"):
        oo.Rule(".*", codec="int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="codec is 'int4'; it must be one of"):
        oo.low_bit(optax.adam(1.0), ".*", "int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="memory_kind is 'host'; it must be 'pinned"):
        oo.set_memory_kind(X, ".*", "host")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="memory_kind is 'device'; offload_states mov"):
        oo.offload_states(X, memory_kind="device")  # pyright: ignore
    with pytest.raises(ValueError, match="late_gradients is 'both'; it must be one of"):
        oo.stream(step, late_gradients="both")  # pyright: ignore[reportArgumentType]
    kinds: list[Any] = [oo.Rule(".*", "device").memory_kind]
    assert kinds == ["device"]


def test_rules_are_text_or_rules():
    """One, or a list of either."""
    for rules in ("a", oo.Rule("a"), ["a", "b"], [oo.Rule("a"), "b"]):
        assert oo.offload(optax.adam(1.0), rules)
    with pytest.raises(TypeError, match="rules must be a regex, a Rule"):
        oo.offload(optax.adam(1.0), 3)  # pyright: ignore[reportArgumentType]
