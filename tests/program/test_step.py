"""A train step as one value: its equations, those of its updates among them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from small_jaxprs import closed_of, load, names, on_device, on_host, only, store
from small_steps import (
    at_rest,
    loss,
    offloaded,
    stack,
    step_of,
    taken_apart,
    trained,
)

from optax_offload._program import (
    apart,
    entered,
    handed_on,
    is_transfer,
    of_values,
    variables,
    within,
)
from optax_offload._program.primitives import is_load, is_store

STACK, ROW = on_device(4, 3), on_device(3)


def test_an_update_is_its_equations():
    """No call remains; where its equations are, and what it takes, is known."""
    step = trained(optax.trace(0.9))
    (inlined,) = step.inlined_updates
    own = names(step.program.equations[i] for i in inlined.positions)
    assert own == ["device_put", "mul", "add", "device_put"]
    assert "offloaded_update" not in names(step.program.equations)
    assert all(step.inlined_at[i] is inlined for i in inlined.positions)
    assert set(step.inlined_at) == set(inlined.positions)
    assert [o.stored for o in inlined.what.update.outputs] == [False, True]
    assert len(inlined.operands) == len(inlined.what.update.inputs)


def test_state_is_loaded_and_stored_once():
    """State is not loaded for the update but in it, and returns to the host."""
    step = trained(optax.adam(1e-3))
    equations = step.program.equations
    loads = [e for e in equations if is_transfer(e) and not is_store(e)]
    assert len(loads) == 2
    assert len(list(filter(is_store, equations))) == 2
    *_, mu, nu = step.program.outvars
    assert {mu, nu} == {v for e in filter(is_store, equations) for v in e.outvars}


def test_parameters_at_rest_return():
    """What replaces a parameter at rest goes there; scans load rows of it."""
    step = trained(optax.trace(0.9), params_at_rest=True)
    rest = step.at_rest
    assert rest is not None
    assert step.moves_rows
    params = rest.arguments[0]
    assert (params.position, params.returns, params.is_state) == (0, True, False)
    assert params.scans == (6, 6)
    assert params.whole == ("add",)
    state = rest.arguments[1]
    assert (state.is_state, state.scans, state.whole) == (True, (), ())
    assert not state.returns  # Its update leaves it there.
    assert rest.positions == "others"  # The backward pass counts down.
    new, *_ = step.program.outvars
    assert step.program.equations[step.program.producers[new]].primitive.name == (
        "device_put"
    )


def test_a_forward_scan_counts_up():
    """So a GPU's copy engines may move its rows."""

    def forward(w, x):
        return lax.scan(lambda h, r: (h * r, None), x, w)[0]

    step = taken_apart(forward, on_host(4, 3), ROW)
    assert step.at_rest is not None
    assert step.at_rest.positions == "rising"
    (arguments,) = step.at_rest.arguments
    assert (arguments.scans, arguments.whole, arguments.returns) == ((4,), (), False)


def test_a_loop_around_a_scan_loads_rows_again():
    """Once for each of its iterations."""

    def microbatches(w, xs):
        def one(total, x):
            h, _ = lax.scan(lambda h, r: (h * r, None), x, w)
            return total + h, None

        return lax.scan(one, jnp.zeros(3), xs)[0]

    step = taken_apart(microbatches, on_host(4, 3), on_device(5, 3))
    assert step.at_rest is not None
    (arguments,) = step.at_rest.arguments
    assert (arguments.scans, arguments.again) == ((4,), 5)


def test_nothing_at_rest():
    """A step whose arguments are all on the device moves no rows."""
    step = step_of(lambda x: x + 1.0, ROW)
    assert step.at_rest is None
    assert not step.moves_rows


def test_residuals_on_request():
    """What scans stack for scans alone rests on the host, if it is large enough."""

    def large(w, x):
        return jnp.sum(lax.scan(lambda h, r: (jnp.sin(h * r), None), x, w)[0])

    def gradient(w, x):
        return jax.grad(large, argnums=1)(w, x)

    shape = 4, 2**15
    for residuals in (False, True):
        step = taken_apart(
            gradient, on_device(*shape), on_device(2**15), residuals=residuals
        )
        # A product for each layer: the cosine of its sine, times its row.
        kept = step.at_rest.residual_bytes if step.at_rest else 0
        assert kept == (4 * 4 * 2**15 if residuals else 0)
    small = taken_apart(gradient, STACK, ROW, residuals=True)
    assert small.at_rest is not None
    assert small.at_rest.residual_bytes == 0


def test_origins():
    """Which output of an update a variable is, also when it was constrained."""
    tx = offloaded(optax.trace(0.9))
    state = at_rest(jax.eval_shape(optax.trace(0.9).init, STACK))

    def step(g, state):
        updates, state = tx.update(g, state)
        return lax.optimization_barrier(updates), updates * 2.0, state

    found = taken_apart(step, STACK, state)
    update, product, new = found.program.outvars
    (origin,) = found.origins[update]
    assert origin.inlined.what.update.outputs[origin.output].is_update
    (origin,) = found.origins[new]
    assert origin.inlined.what.update.outputs[origin.output].stored
    assert product not in found.origins


def test_scans_in_checkpoints_are_taken_out():
    """A scan that a checkpoint holds is an equation of the step."""

    def checkpointed(w, x):
        return jnp.sum(jax.checkpoint(lambda w, x: loss(w, x))(w, x))

    step = trained(optax.trace(0.9), loss=checkpointed)
    # The layers forward, again for the backward pass, and that.
    assert names(step.program.equations).count("scan") == 3
    assert names(step.program.equations).count("optimization_barrier") == 1
    assert "remat2" not in names(step.program.equations)
    without = step_of(lambda x: jax.checkpoint(jnp.sin)(x), ROW)
    assert names(without.program.equations) == ["remat2"]


def test_rows_that_a_scan_passes_on_are_its_operand():
    """As in `nnx.scan`: what it gives back as it was is no result of it."""

    def fn(w, x):
        def body(h, r):
            return h * r, jax.checkpoint(lambda r: r)(r)

        h, same = lax.scan(body, x, w)
        return h, same * 2.0

    step = step_of(fn, STACK, ROW)
    product = only(step.program.equations, "mul")
    assert product.invars[0] is step.program.invars[0]


def printing(x):
    """Two prints, of which no result follows."""
    jax.debug.print("{}", x[0], ordered=True)
    y = jnp.sin(x)
    jax.debug.print("{}", x[1], ordered=True)
    return y


def test_effects_follow_each_other():
    """Each has a token, which it takes of the one before; other equations have none."""
    step = step_of(printing, ROW)
    equations = step.program.equations
    first, second = (i for i in range(len(equations)) if step.tokens(i))
    assert set(step.tokens(first)) <= set(step.reads(second))
    assert set(step.tokens(second)).isdisjoint(step.reads(first))
    assert set(step.tokens(first)) <= set(step.defines(first))
    (sine,) = (i for i, e in enumerate(equations) if e.primitive.name == "sin")
    assert step.reads(sine) == variables(equations[sine].invars)
    assert step.defines(sine) == equations[sine].outvars
    assert {first, second, sine} <= step.live


def test_what_is_left_of_an_update():
    """One output, with its own equations and what it takes; others are known."""
    step = trained(optax.adam(1e-3))
    (inlined,) = step.inlined_updates
    outputs = inlined.what.update.outputs
    (mu,) = (k for k, o in enumerate(outputs) if o.path.endswith("mu"))
    update, operands = inlined.left([mu], [])
    assert [o.path for o in update.outputs] == [outputs[mu].path]
    assert len(update.program.invars) == len(operands) == 2  # A gradient, the old mu.
    alias = update.outputs[0].alias
    assert alias is not None
    assert update.inputs[alias].on_host
    assert names(update.program.equations).count("sqrt") == 0
    # What a step knows already is taken, and not computed again.
    update_of, positions = inlined.what.update, inlined.positions
    squares = [
        e
        for e in map(step.program.equations.__getitem__, positions)
        if e.primitive.name == "sqrt"
    ]
    (root,) = squares
    new, operands = inlined.left([0], root.outvars)
    assert root.outvars[0] in operands
    assert "sqrt" not in names(new.program.equations)
    assert len(operands) == len(new.program.invars) == len(new.inputs)
    assert update_of.outputs[0].is_update


def test_apart_is_one_transfer_for_each():
    """Of many at once; other equations stay one."""
    closed = closed_of(lambda x, y: store((x, y)), STACK, ROW)
    (e,) = closed.jaxpr.eqns
    first, second = apart(e)
    assert (first.invars, first.outvars) == (e.invars[:1], e.outvars[:1])
    assert (second.invars, second.outvars) == (e.invars[1:], e.outvars[1:])
    assert all(len(value) == 1 for value in second.params.values())
    (sine,) = closed_of(jnp.sin, ROW).jaxpr.eqns
    assert apart(sine) == [sine]


@pytest.mark.parametrize(
    ("fn", "handed"),
    [
        (store, True),
        (lambda x: x.astype(jnp.bfloat16), True),
        (lambda x: lax.optimization_barrier(x), True),
        (lambda x: x + 1.0, False),
        (lambda x: x.T, False),
    ],
    ids=["transfer", "cast", "barrier", "sum", "transposed"],
)
def test_handed_on(fn, handed):
    """What gives back what it takes, in another memory or dtype, or as it was."""
    (e,) = closed_of(fn, STACK).jaxpr.eqns
    assert list(handed_on(e)) == ([(e.invars[0], e.outvars[0])] if handed else [])


def test_handed_on_leaf_by_leaf():
    """Each operand becomes the result at its position."""
    (e,) = closed_of(
        lambda x, y: lax.optimization_barrier((x, y)), STACK, ROW
    ).jaxpr.eqns
    assert list(handed_on(e)) == list(zip(e.invars, e.outvars, strict=True))


@pytest.mark.parametrize(
    ("fn", "given", "transfer", "stores"),
    [
        (store, STACK, True, True),
        (load, on_host(4, 3), True, False),
        (store, on_host(4, 3), True, False),
        (load, STACK, False, False),
        (jnp.sin, STACK, False, False),
    ],
    ids=["store", "load", "kept there", "kept here", "sin"],
)
def test_transfers(fn, given, transfer, stores):
    """A transfer has something on the host; a store comes from the device."""
    for e in closed_of(fn, given).jaxpr.eqns:
        assert is_transfer(e) is transfer
        assert is_store(e) is stores
        assert is_load(e) is (transfer and not stores and fn is load)


def test_of_values_without_refs():
    """A function without refs is as it was."""
    closed = closed_of(jnp.sin, ROW)
    assert of_values(closed) == (closed, ())


def test_of_values_of_a_ref():
    """Its value is the last argument, its new value the last result."""
    ref = jax.new_ref(jnp.arange(3.0))

    def count(x):
        ref[...] = ref[...] * 3.0 + x
        return ref[...] * 2.0

    pure, refs = of_values(closed_of(count, ROW))
    assert refs == (ref,)
    x = np.ones(3, np.float32)
    result, after = jax.core.eval_jaxpr(pure.jaxpr, pure.consts, x, np.arange(3.0))
    np.testing.assert_array_equal(after, 3 * np.arange(3) + 1)
    np.testing.assert_array_equal(result, 2 * (3 * np.arange(3) + 1))
    np.testing.assert_array_equal(ref[...], np.arange(3))


@pytest.mark.parametrize("where", ["step", "scan", "jit"])
def test_of_values_of_refs_of_its_own(where):
    """They are gone: no equation makes one."""

    def doubled(x):
        ref = jax.new_ref(x)

        def double(_, carry):
            ref[...] *= 2.0
            return carry

        if where == "scan":
            lax.fori_loop(0, 3, double, 0)
        else:
            double(0, 0)
        return jax.freeze(ref)

    fn = jax.jit(doubled) if where == "jit" else doubled
    pure, refs = of_values(closed_of(fn, ROW))
    assert refs == ()
    equations = [x for e in pure.jaxpr.eqns for x in (e, *within(e))]
    made = [v.aval for e in equations for v in e.outvars]
    assert not any(isinstance(aval, jax.ref.AbstractRef) for aval in made)
    (got,) = jax.core.eval_jaxpr(pure.jaxpr, pure.consts, np.arange(3.0))
    times = 8 if where == "scan" else 2
    np.testing.assert_array_equal(got, times * np.arange(3))


def test_a_function_that_stores_stacks():
    """As an initialiser does: a scan stores its rows as it makes them."""

    def init(x):
        _, rows = lax.scan(lambda c, _: (c * 2.0, c), x, None, length=4)
        return store(rows)

    step = step_of(init, ROW)
    assert step.at_rest is not None
    assert step.at_rest.made_bytes == 4 * 3 * 4
    scan = only(step.program.equations, "scan")
    (body,) = entered(scan)
    assert [x.stack for x in body.stores] == scan.outvars[1:]
    assert not any(map(is_transfer, body.jaxpr.eqns))


def test_every_update_is_found():
    """Two updates of two optimizers, in their order."""
    one, two = offloaded(optax.trace(0.9)), offloaded(optax.scale_by_adam())
    params = stack()
    states = [
        at_rest(jax.eval_shape(tx.init, params))
        for tx in (optax.trace(0.9), optax.scale_by_adam())
    ]

    def step(g, first, second):
        updates, first = one.update(g, first)
        updates, second = two.update(updates, second)
        return updates, first, second

    found = taken_apart(step, params, *states)
    first, second = found.inlined_updates
    assert first.positions.stop <= second.positions.start
    assert len(first.what.update.outputs) == 2
    assert len(second.what.update.outputs) == 4
