"""What must be on the device together: an update taken apart."""

import jax
import jax.numpy as jnp
import pytest
from small_jaxprs import names
from small_updates import update_of

from optax_offload._schedule.updates.groups import group

pytestmark = pytest.mark.usefixtures("runs_once")

STACK = 16, 128, 256
ROW_BYTES = 4 * 128 * 256


def momenta(fn=lambda g, s: 0.9 * s + g):
    """An update of two leaves, each with a momentum of its own."""

    def update(a, b, ma, mb):
        ma, mb = fn(a, ma), fn(b, mb)
        return -ma, -mb, ma, mb

    return update


def paths(update, grouping):
    """The outputs of each group."""
    return [[update.outputs[k].path for k in g.outputs] for g in grouping.groups]


def test_each_state_is_a_group():
    """With the update that follows from it; the last layer comes first."""
    update = update_of(momenta(), [STACK] * 2, [STACK] * 2)
    found = group(update)
    assert [sorted(x) for x in paths(update, found)] == [["g1", "s1"], ["g0", "s0"]]
    assert [g.loads for g in found.groups] == [(3,), (2,)]
    assert all(g.in_place and g.rows == STACK[0] for g in found.groups)
    assert [g.nbytes for g in found.groups] == [16 * ROW_BYTES] * 2
    assert (found.scalars, found.shared, found.joined) == ((), (), False)
    assert [g.tied_by for g in found.groups] == [(), ()]


def test_natural_order():
    """Layer ten comes after layer nine, and so before it here."""
    count = 11

    def fn(*args):
        state = [0.9 * s + g for g, s in zip(args[:count], args[count:], strict=True)]
        return (*state, *state)

    shapes = [STACK] * count
    found = update_of(fn, shapes, shapes)
    first = [min(x) for x in paths(found, group(found))]
    assert first == [f"g{n}" for n in reversed(range(count))]


def test_an_equation_joins_two_leaves():
    """State of two parameters is one group, which says what joins it."""

    def fn(a, b, ma, mb):
        both = ma + mb
        return a * both, b * both, ma + a, mb + b

    found = group(update_of(fn, [STACK] * 2, [STACK] * 2))
    (both,) = found.groups
    assert set(both.loads) == set(both.joined) == {2, 3}
    assert names(both.tied_by) == ["add"]


def test_a_number_joins_nothing():
    """A counter is loaded before all groups; what follows from it is shared."""

    def fn(a, b, count, ma, mb):
        rate = 1.0 / (count + 1.0)
        ma, mb = 0.9 * ma + a, 0.9 * mb + b
        return rate * ma, rate * mb, count + 1.0, ma, mb

    update = update_of(fn, [STACK] * 2, [(), STACK, STACK])
    found = group(update)
    assert found.scalars == (2,)
    shared = names(update.program.equations[i] for i in found.shared)
    assert "div" in shared
    assert "mul" not in shared
    assert [sorted(x) for x in paths(update, found) if len(x) > 1] == [
        ["g1", "s2"],
        ["g0", "s1"],
    ]


def test_a_norm_of_gradients_is_shared():
    """It needs several gradients before the first group: they are joined, not state."""

    def fn(a, b, ma, mb):
        norm = jnp.sqrt(jnp.sum(a * a) + jnp.sum(b * b))
        ma, mb = 0.9 * ma + a / norm, 0.9 * mb + b / norm
        return ma, mb, ma, mb

    update = update_of(fn, [STACK] * 2, [STACK] * 2)
    found = group(update)
    assert found.joined
    assert len(found.groups) == 2
    shared = names(update.program.equations[i] for i in found.shared)
    assert shared.count("reduce_sum") == 2

    def each(a, b, ma, mb):
        ma = 0.9 * ma + a / jnp.sum(a * a)
        mb = 0.9 * mb + b / jnp.sum(b * b)
        return ma, mb, ma, mb

    assert not group(update_of(each, [STACK] * 2, [STACK] * 2)).joined


def test_a_norm_of_state_joins_all():
    """Sums of numbers are named, which join the leaves, and not what follows."""

    def fn(a, b, ma, mb):
        norm = jnp.sum(ma * ma) + jnp.sum(mb * mb)
        ma, mb = 0.9 * ma + a / norm, 0.9 * mb + b / norm
        return ma, mb, ma, mb

    (both,) = group(update_of(fn, [STACK] * 2, [STACK] * 2)).groups
    assert names(both.tied_by) == ["add"]
    assert both.row_local is None
    assert both.whole_reason


def test_sums_of_numbers_are_named_first():
    """Also where another equation joins more leaves: a norm says more than that."""

    def fn(a, b, c, ma, mb, mc):
        norm = jnp.sum(ma * ma) + jnp.sum(mb * mb)
        every = jnp.concatenate([ma, mb, mc])
        ma, mb, mc = ma + a * norm, mb + b * jnp.max(every), mc + c
        return ma, mb, mc, ma, mb, mc

    (every,) = group(update_of(fn, [STACK] * 3, [STACK] * 3)).groups
    assert names(every.tied_by) == ["add"]

    def without(a, b, c, ma, mb, mc):
        every = jnp.concatenate([ma, mb, mc])
        ma, mb, mc = ma + a + mb, mb + b * jnp.max(every), mc + c
        return ma, mb, mc, ma, mb, mc

    (every,) = group(update_of(without, [STACK] * 3, [STACK] * 3)).groups
    assert names(every.tied_by) == ["concatenate"]


def test_state_that_stays_as_it_is_is_not_moved():
    """What comes back as it came is neither loaded nor stored."""

    def fn(a, ma, first):
        ma = 0.9 * ma + a
        return ma, ma, first

    update = update_of(fn, [STACK], [STACK, STACK])
    (only,) = group(update).groups
    assert only.loads == (1,)
    assert sorted(paths(update, group(update))[0]) == ["g0", "s0"]


def test_state_that_follows_from_no_state():
    """A store without a load is a group of its own."""

    def fn(a, last):
        return -a, a * 2.0

    update = update_of(fn, [STACK], [STACK])
    (only,) = group(update).groups
    assert only.loads == ()
    assert [update.outputs[k].path for k in only.outputs] == ["s0"]


def test_what_one_group_alone_needs_is_its_own():
    """Where a group is computed whole, so is what only it takes; else it is shared."""

    def fn(a, b, ma, mb):
        ma = ma[::-1] + jnp.tanh(a)[::-1]
        mb = mb[::-1] + jnp.tanh(b)[::-1]
        return ma, mb, ma, mb

    update = update_of(fn, [STACK] * 2, [STACK] * 2)
    found = group(update)
    assert found.shared == ()
    for g in found.groups:
        own = names(update.program.equations[i] for i in g.equations)
        assert sorted(own) == ["add", "rev", "rev", "tanh"]

    def shares(a, b, ma, mb):
        both = jnp.tanh(a)[::-1]
        return ma[::-1] + both, mb[::-1] + both, ma[::-1] + both, mb[::-1] + both

    update = update_of(shares, [STACK] * 2, [STACK] * 2)
    shared = names(update.program.equations[i] for i in group(update).shared)
    assert shared == ["tanh", "rev"]


def test_effects_are_shared():
    """They happen once, before all groups, whoever takes what they print."""

    def fn(a, ma):
        jax.debug.print("{}", a[0, 0, 0])
        ma = 0.9 * ma + a
        return ma, ma

    update = update_of(fn, [STACK], [STACK])
    shared = names(update.program.equations[i] for i in group(update).shared)
    assert any("debug" in name for name in shared)


def test_bytes_are_of_loads_or_stores():
    """Whichever is more: of a sum of two moments the loads."""

    def fn(a, m, v):
        both = m + v
        return both, both + a, v

    (only,) = group(update_of(fn, [STACK], [STACK] * 2)).groups
    assert only.nbytes == only.moved_bytes == 2 * 16 * ROW_BYTES
