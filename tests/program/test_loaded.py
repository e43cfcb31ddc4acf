"""What is loaded, or computed of that alone, and what makes it again."""

import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from small_jaxprs import load, names, on_device, on_host, program_of, store

from optax_offload._program import CODES
from optax_offload._program.loaded import Loaded

W, X = on_host(4, 4), on_device(4, 4)


def loaded_of(program, *given):
    """What is loaded in a program."""
    found = Loaded({*given})
    for e in program.equations:
        found.add(e)
    return found


def made_by(program, found):
    """The primitives whose results are loaded or computed of that alone, in order."""
    equations = program.equations
    return names(e for e in equations if any(v in found for v in e.outvars))


def scaled(w, x, scale):
    """A product of what is decoded, with arithmetic of more than that after it."""
    decoded = load(w) * scale + jnp.ones((4, 4)).T
    return (x @ decoded) * decoded


def test_what_is_loaded_and_computed_of_that_alone():
    """Also of what is given and of nothing; no product, and nothing of one."""
    program = program_of(scaled, W, X, X)
    w, x, scale = program.invars
    found = loaded_of(program, w, scale)
    assert made_by(program, found) == ["device_put", "mul", "add"]
    assert [*found.rests.values()] == [w]
    assert not any(v in found for v in (w, x, scale, *found.constants))
    constant = names(
        e for e in program.equations if not found.constants.isdisjoint(e.outvars)
    )
    assert constant == ["broadcast_in_dim", "transpose"]


def test_what_is_not_there_all_the_time():
    """A scale that is computed has to be kept, and so has what is computed of it."""
    program = program_of(scaled, W, X, X)
    assert made_by(program, loaded_of(program)) == ["device_put"]


def test_what_is_computed_of_given_arrays_alone():
    """No load is in it."""
    program = program_of(lambda x: x * 2 + 1, X)
    assert not made_by(program, loaded_of(program, *program.invars))


@pytest.mark.parametrize(
    ("codes", "made"),
    [(lambda x: x, ["name", "mul"]), (jnp.sin, []), (jnp.zeros_like, [])],
    ids=["given", "computed", "constant"],
)
def test_codes(codes, made):
    """On the device they count as loaded, where they are arguments."""
    program = program_of(lambda x: checkpoint_name(codes(x), CODES) * 2, X)
    found = loaded_of(program, *program.invars)
    assert made_by(program, found) == made
    assert [*found.rests.values()] == program.invars[: bool(made)]


def test_stores_are_no_loads():
    """They are not computed again either."""
    program = program_of(lambda w: store(load(w) * 2), W)
    found = loaded_of(program, *program.invars)
    assert made_by(program, found) == ["device_put", "mul"]


def test_what_makes_it_again():
    """Positions in order, each once; loads in the order in which they are taken."""

    def fn(w, x, other):
        decoded = load(w) * 2
        return (load(other) + decoded) + decoded * jnp.ones((4, 4)), x * 3

    program = program_of(fn, W, X, W)
    found = loaded_of(program, *program.invars)
    positions, loads = found.made_of(program, program.results)
    computed = [program.equations[i].primitive.name for i in positions]
    assert sorted(computed) == sorted(["mul", "add", "broadcast_in_dim", "mul", "add"])
    assert positions == sorted(positions)
    w, _, other = program.invars
    assert {found.rests[v] for v in loads} == {w, other}
    assert found.made_of(program, loads[:1]) == ([], loads[:1])
    assert found.made_of(program, program.invars) == ([], [])
