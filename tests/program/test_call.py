"""The call of an update: what its body has of the update's own equations."""

import jax
import optax
from jax.extend import core as jex
from small_jaxprs import on_device

import optax_offload as oo
from optax_offload._places.rules import Rule
from optax_offload._program import Builder, called, is_transfer, variables

LEAF = on_device(8, 128)


def test_the_body_of_a_call_is_the_updates_own_equations():
    """None is traced or written once more, but those that take what is loaded."""
    traced = []

    def update(updates, state, params=None):
        traced.append(updates)
        return optax.adam(1e-3).update(updates, state, params)

    inner = optax.GradientTransformation(optax.adam(1e-3).init, update)
    tx = oo.offload(inner, Rule(".*/(mu|nu)/.*", min_bytes=0))
    params = {"a": LEAF, "b": LEAF}
    state = oo.eval_shape(tx.init, params)
    traced.clear()
    closed = jax.make_jaxpr(tx.update)(params, state, params)
    ((what, body),) = [
        (what, e.params["jaxpr"]) for e in closed.jaxpr.eqns if (what := called(e))
    ]
    own = set(map(id, what.update.program.equations))
    moves = [e for e in body.jaxpr.eqns if is_transfer(e)]
    loaded = {v for e in moves for v in e.outvars}
    written = [
        e
        for e in body.jaxpr.eqns
        if id(e) not in own and loaded.isdisjoint(variables(e.invars))
    ]
    assert len(traced) == 1
    assert len(moves) == 8  # Two of each parameter come, and go.
    assert [e for e in written if not is_transfer(e)] == []
    assert len(body.jaxpr.eqns) == len(own) + len(moves)


def test_a_move_is_traced_once_for_leaves_of_a_type(monkeypatch):
    """Of leaves of one type there are many."""
    traced = []
    make_jaxpr = jax.make_jaxpr
    monkeypatch.setattr(
        jax, "make_jaxpr", lambda fn: traced.append(fn) or make_jaxpr(fn)
    )
    builder = Builder()
    given = [jex.Var(LEAF) for _ in range(3)]
    stored = [builder.move(v, "pinned_host") for v in given]
    assert len(traced) == 1
    assert [e.invars for e in builder.equations] == [[v] for v in given]
    assert [e.outvars for e in builder.equations] == [[v] for v in stored]
    assert all(is_transfer(e) for e in builder.equations)
    assert builder.move(stored[0], "pinned_host") is stored[0]
