"""An update as a value: what is left of it where only some results are wanted."""

import jax
import jax.numpy as jnp
from jax.experimental import io_callback
from small_jaxprs import names, on_device, only, program_of

from optax_offload._program import Input, Output, Update

VECTOR = on_device(3)


def update_of(fn, *types):
    """An update with the equations of a function."""
    program = program_of(fn, *types)
    outputs = (
        Output(f"mu/{k}", "device", k, is_update=False)
        for k, _ in enumerate(program.outvars)
    )
    return Update(program, tuple(Input() for _ in types), tuple(outputs))


def test_restricted_to_a_result():
    """It has what the result needs, and the argument whose place that takes."""
    update = update_of(lambda x, y: (jnp.sin(y), jnp.cos(x)), VECTOR, VECTOR)
    left, inputs = update.restricted([1])
    assert names(left.program.equations) == ["cos"]
    assert inputs == [0, 1]
    assert [(x.path, x.alias) for x in left.outputs] == [("mu/1", 1)]


def test_effects_and_what_is_known_are_not_computed_again():
    """A part has neither, nor what only they need."""

    def step(x):
        y = jnp.exp(x)
        jax.debug.callback(lambda _: None, y)
        return jnp.sin(jnp.tanh(y)) + io_callback(lambda a: a, VECTOR, y)

    update = update_of(step, VECTOR)
    (known,) = only(update.program.equations, "tanh").outvars
    left, _ = update.restricted([0], [known])
    assert names(left.program.equations) == ["sin", "add"]
    assert left.program.invars[-1] is known
