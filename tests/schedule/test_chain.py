"""A step of layers that Python loops over is cut into segments, each with its loads."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core as jex
from limited import limited
from small_steps import matrices
from small_steps import unrolled as loss
from small_updates import update_of

import optax_offload as oo
from optax_offload._ground import compat
from optax_offload._ground.units import size_text
from optax_offload._places.memory import nbytes, on_host
from optax_offload._program import Step, flatten, flops_of
from optax_offload._schedule import Segment, follow
from optax_offload._schedule.turns import ties
from optax_offload._schedule.turns.placing import independent
from optax_offload._schedule.turns.segments import Move, Product, Stored

# By the version of JAX: all tests here have it as with the newest.
SEGMENTS_ARE_FREED = compat.SEGMENTS_ARE_FREED
LAYERS, WIDTH = 5, 16
MATRIX_BYTES = WIDTH * WIDTH * 4
WEIGHT = (WIDTH, WIDTH)


@pytest.fixture(autouse=True)
def one_layer_to_a_segment(monkeypatch):
    """However small a layer is, and residuals of any size."""
    limited(monkeypatch, segment_bytes=MATRIX_BYTES, least_part=1)
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)
    limited(monkeypatch, least_segments=3, least_residual_bytes=1)


def cut(fn, *args, **options):
    """The chain of a function whose first argument rests on the host, with its step."""
    plan = planned(fn, *args, **options)
    assert plan.chain is not None
    return plan.chain, plan.step


def planned(fn, *args, **options):
    """The plan of such a function."""
    at_rest = oo.set_memory_kind(args[0], ".*", "pinned_host")
    return oo.jit(fn, **options).schedule(at_rest, *args[1:])


def names(step: Step, positions):
    """The primitives of equations."""
    return [step.program.equations[i].primitive.name for i in positions]


def numbers(step: Step, some):
    """Which arguments some variables are."""
    return [step.program.invars.index(v) for v in some]


def loads(step: Step, segments):
    """The arguments that each segment takes, as positions."""
    return [numbers(step, s.loads) for s in segments]


def plain_gradients(layers, x):
    """Their gradients."""
    return jax.grad(loss)(layers, x)


def train_step(tx, gradients=plain_gradients):
    """A step of these layers."""

    def step(layers, state, x):
        grads = gradients(layers, x)
        updates, state = tx.update(grads, state, layers)
        return optax.apply_updates(layers, updates), state

    return step


def outputs(link):
    """How many outputs of updates are made between segments."""
    return [len(node.left.results) for node in link if node.left]


def test_each_layer_is_a_segment():
    """Forward, and then backward, where each is loaded again."""
    found, step = cut(jax.grad(loss), matrices(), jnp.ones((4, WIDTH)))
    forward = list(range(LAYERS))
    # The last layer's rows are there still when the backward pass begins.
    assert loads(step, found.segments) == [[i] for i in [*forward, *forward[-2:0:-1]]]


def test_each_loads_for_the_next():
    """The first loads its own, and the last nothing."""
    found, _ = cut(jax.grad(loss), matrices(), jnp.ones((4, WIDTH)))
    first, *others = found.segments
    assert first.own == first.loads
    assert not any(s.own for s in others)
    for before, after in zip(found.segments, others, strict=False):
        assert before.ahead == after.loads
    assert not found.segments[-1].ahead


def test_a_step_of_few_segments_is_not_cut(monkeypatch):
    """What fits into two turns, or has layers in a scan, is left as it was."""
    x = jnp.ones((4, WIDTH))
    assert planned(loss, matrices(2), x).chain is None
    assert planned(loss, matrices(3), x).chain is not None
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", False)
    assert planned(loss, matrices(3), x).chain is None
    monkeypatch.setattr(compat, "SEGMENTS_ARE_FREED", True)
    limited(monkeypatch, segment_bytes=LAYERS * MATRIX_BYTES)
    assert planned(jax.grad(loss), matrices(), x).chain is None


def test_what_one_equation_takes_is_together():
    """A product of two layers' matrices takes both, whatever their size."""

    def of_pairs(layers, x):
        for w, v in zip(layers[::2], layers[1::2], strict=True):
            x = jnp.tanh(x @ (w @ v))
        return jnp.mean(x**2)

    found, step = cut(of_pairs, matrices(6), jnp.ones((4, WIDTH)))
    assert loads(step, found.segments) == [[0, 1], [2, 3], [4, 5]]


def test_checkpoints_are_taken_apart():
    """Of two layers each is a turn; nothing waits for what is loaded elsewhere."""

    def of_pairs(layers, x):
        for w, v in zip(layers[::2], layers[1::2], strict=True):
            x = jax.checkpoint(lambda x, w, v: jnp.tanh(jnp.tanh(x @ w) @ v))(x, w, v)
        return jnp.mean(x**2)

    found, step = cut(jax.grad(of_pairs), matrices(6), jnp.ones((4, WIDTH)))
    assert loads(step, found.segments)[:6] == [[i] for i in range(6)]
    inside = [name for s in found.segments for name in names(step, s.positions)]
    assert "remat2" not in inside
    assert "optimization_barrier" in inside
    barriers = [e for e in step.program.equations if len(e.outvars) > 1]
    shapes = [v.aval.shape for e in barriers for v in e.outvars]
    assert WEIGHT not in shapes


def test_a_segment_ends_where_least_goes_on():
    """Not in the middle of a layer, where what is wide would have to be handed on."""

    def wide(layers, x):
        for w in layers:
            x = jnp.mean(
                jnp.repeat(jnp.tanh(x @ w), 100, axis=0).reshape(4, 100, -1), 1
            )
        return x

    found, step = cut(wide, matrices(), jnp.ones((4, WIDTH)))
    assert loads(step, found.segments) == [[i] for i in range(LAYERS)]
    for s in found.segments:
        assert [v.aval.shape for v in s.results] == [(4, WIDTH)]


def test_casts_are_made_where_they_are_taken():
    """Not all of them at the beginning, where a step writes them, and twice."""

    def cast_first(layers, x):
        return loss([w.astype(jnp.bfloat16) for w in layers], x)

    x = jnp.ones((4, WIDTH), jnp.bfloat16)
    found, step = cut(jax.grad(cast_first), matrices(), x)
    assert loads(step, found.segments)[:LAYERS] == [[i] for i in range(LAYERS)]
    for segment in found.segments[:-1]:
        assert "convert_element_type" in names(step, segment.positions)
        made = (step.program.producers[v] for v in segment.results)
        taken = [step.program.equations[i].invars for i in made]
        assert not any(v is a for some in taken for a in some for v in segment.names)


def test_what_is_made_between_turns_is_computed_again_too():
    """Of a forward pass without turns only what products make is handed on."""

    def gelus(layers, x):
        for w in layers:
            x = jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    # Each turn of the backward pass also takes what is at rest, for a norm.
    tx = adam_at_rest()

    def step(rest, layers, state, x):
        grads = jax.grad(gelus)(layers, x)
        updates, state = tx.update(grads, state, layers)
        norm = optax.tree.norm(jax.tree.map(jnp.add, rest, grads))
        return optax.apply_updates(layers, updates), state, norm

    x = jnp.ones((64 * WIDTH, WIDTH))
    args = matrices(), matrices(), tx.init(matrices()), x
    found, of = cut(step, *args)
    between = [link for link in found.links if not isinstance(link, Segment)]
    made = {v for link in between for x in link for v in x.defines}
    taken = {v for s in found.segments for i in s.positions for v in of.reads(i)}
    inside = {v for s in found.segments for i in s.positions for v in of.defines(i)}
    large = [v for v in made & (taken - inside) if v.aval.shape == x.shape]
    # And the cotangent of the last layer.
    producers = of.program.producers
    handed = {*names(of, (producers[v] for v in large))}
    assert handed - {"add_any"} == {"dot_general"}


def test_what_comes_between_is_in_the_segment_before():
    """As a head that is on the device; only what comes first and last is outside."""

    def with_head(layers, head, x):
        for w in layers:
            x = jnp.tanh(x @ w)
        return jnp.mean(jax.nn.log_softmax(x @ head))

    head = jnp.ones((WIDTH, 64))
    found, step = cut(jax.grad(with_head), matrices(), head, jnp.ones((4, WIDTH)))
    assert not any(isinstance(x, tuple) for x in found.links[:-1])
    inside = step.program.equations[found.segments[LAYERS - 1].positions[-1]]
    made = [v.aval.shape for v in inside.outvars]
    logits = (
        n
        for n, s in enumerate(found.segments)
        for i in s.positions
        if step.program.equations[i].outvars[0].aval.shape == (4, 64)
    )
    assert set(logits) == {LAYERS - 1}, made


def updated(found):
    """How many results updates have in each segment, and between segments."""
    inside = [outputs(s.updates) for s in found.segments]
    between = [outputs(link) for link in found.links if not isinstance(link, Segment)]
    return [sum(x) for x in inside], [sum(x) for x in between if x]


def adam_at_rest():
    """Adam, with all of its state on the host."""
    return oo.offload(optax.adam(1e-2), oo.Rule(".*", min_bytes=0))


def clipped(where):
    """The same with a clip before it, or inside of what is offloaded."""
    clip = optax.clip_by_global_norm(1.0)
    if where == "before":
        return optax.chain(clip, adam_at_rest())
    return oo.offload(optax.chain(clip, optax.adam(1e-2)), oo.Rule(".*", min_bytes=0))


def test_updates_are_in_the_turn_after():
    """After that which completes their gradients, and loaded by it."""
    tx = adam_at_rest()
    args = matrices(), tx.init(matrices()), jnp.ones((4, WIDTH))
    found, _ = cut(train_step(tx), *args)
    # Parameter, mu and nu of each layer. The last turn has nothing else; the count of
    # steps is in none.
    forward = [0] * LAYERS
    assert updated(found) == ([*forward, *[3] * LAYERS], [1])
    for before, s in zip(found.segments, found.segments[1:], strict=False):
        if s.updates:
            places = [v for v in s.replaced.values() if v is not None]
            assert set(places) <= set(s.loads) == set(before.ahead)
    assert not found.segments[-1].positions


def of_microbatches(of_each, dtype=jnp.float32):
    """The mean of three microbatches' gradients; something is made of each before."""

    def gradients(layers, x):
        low = jax.tree.map(lambda w: w.astype(dtype), layers)
        parts = jnp.split(x.astype(dtype), 3)
        grads = [jax.tree.map(of_each, jax.grad(loss)(low, part)) for part in parts]
        return jax.tree.map(lambda *gs: sum(gs) / len(gs), *grads)

    return gradients


MICROBATCHES = {
    "summed": of_microbatches(lambda g: g),
    "scaled": of_microbatches(lambda g: g * 0.1),
    "cast": of_microbatches(lambda g: g.astype(jnp.float32), jnp.bfloat16),
}


@pytest.mark.parametrize("tx", [adam_at_rest(), clipped("before")], ids=["", "clipped"])
@pytest.mark.parametrize("gradients", MICROBATCHES.values(), ids=MICROBATCHES)
def test_gradients_of_microbatches_are_added_where_they_are_made(gradients, tx):
    """No sum waits for the gradients of the other layers."""
    args = matrices(), tx.init(matrices()), jnp.ones((12, WIDTH))
    found, step = cut(train_step(tx, gradients), *args)
    at: dict[int, int] = {}
    for n, segment in enumerate(found.segments):
        for i in segment.positions:
            at.setdefault(i, n)
    equations = step.program.equations
    products = [i for i in at if equations[i].outvars[0].aval.shape == WEIGHT]
    products = [i for i in products if names(step, [i]) == ["dot_general"]]
    assert len(products) == 3 * LAYERS
    for i in products:
        then = i
        while names(step, [then]) != ["add"]:
            (v,) = step.defines(then)
            then = min(i for i, e in enumerate(equations) if v in e.invars)
        assert at[then] == at[i]


def test_norms_of_what_is_accumulated_are_summed_where_gradients_are_made():
    """Of gradients and of what rests; a number for them is made before."""
    tx = adam_at_rest()

    def step(layers, kept, state, count, x):
        grads = jax.grad(loss)(layers, x)
        updates, state = tx.update(grads, state, layers)
        mean = jax.tree.map(lambda a, g: a + (g - a) / (count + 1), kept, grads)
        return optax.apply_updates(layers, updates), state, optax.tree.norm(mean)

    kept = oo.set_memory_kind(matrices(), ".*", "pinned_host")
    args = matrices(), kept, tx.init(matrices()), jnp.zeros(()), jnp.ones((4, WIDTH))
    found, of = cut(step, *args)
    sums = [names(of, s.positions).count("reduce_sum") for s in found.segments]
    # Each is beside the product, the last one after the last turn of equations.
    assert sums == [*[0] * LAYERS, *[1, 0] * (LAYERS - 1), 0, 0]
    products = [names(of, s.positions).count("dot_general") for s in found.segments]
    assert products == [*[1] * (3 * LAYERS - 1), 0]


@pytest.mark.parametrize(
    "is_bad", [jnp.isnan, lambda x: jax.lax.cond(x > 9, jnp.isnan, jnp.isinf, x)]
)
def test_an_update_in_a_cond_is_where_its_gradient_is(is_bad):
    """What it depends on, as whether the loss is finite, is known before."""
    tx = adam_at_rest()

    def step(layers, state, x):
        value, grads = jax.value_and_grad(loss)(layers, x)

        def update(layers, state):
            updates, state = tx.update(grads, state, layers)
            return optax.apply_updates(layers, updates), state

        skip = lambda *args: args  # noqa: E731
        return jax.lax.cond(is_bad(value), skip, update, layers, state), value

    args = matrices(), tx.init(matrices()), jnp.ones((4, WIDTH))
    found, _ = cut(step, *args)
    each = [
        sum(len(x.left.results) for x in link if x.left)
        for link in found.links
        if isinstance(link, tuple)
    ]
    # Parameter, mu and nu of each layer; the count of steps is with the first.
    assert [n for n in each if n] == [4, *[3] * (LAYERS - 1)]


@pytest.mark.parametrize("where", ["before", "inside"])
def test_gradients_wait_on_the_host(where):
    """Those whose update needs all of them, stored by the turn after."""
    tx = clipped(where)
    args = matrices(), tx.init(matrices()), jnp.ones((4, WIDTH))
    found, step = cut(train_step(tx), *args, late_gradients="host")
    # That of the first layer is the last, and waits for nothing.
    forward = [0] * LAYERS
    each = [*forward, *[1] * (LAYERS - 1), 3]
    assert updated(found) == (each, [1, 3 * (LAYERS - 1)])
    assert [v.aval.shape for v in found.waiting] == [WEIGHT] * (LAYERS - 1)
    assert all(on_host(v.aval) for v in found.waiting)
    (left,) = [node.left for node in found.links[-1]]
    assert set(found.waiting) < set(left.operands)
    count = 1
    assert len(left.update.loads) == 4 * (LAYERS - 1) + count
    # Each is summed up where it is made, the last of them after the last turn of
    # equations. What the norm scales is nowhere whole.
    sums = [names(step, s.positions).count("reduce_sum") for s in found.segments]
    assert sums[LAYERS - 1 : -1] == [*[1] * (LAYERS - 1), 0]
    between = [link for link in found.links if isinstance(link, tuple)]
    positions = [x.position for link in between for x in link if not x.left]
    assert "select_n" not in names(step, positions)
    assert "4.00 KiB of gradients, whose update needs all of them first" in str(
        planned(train_step(tx), *args, late_gradients="host")
    )


@pytest.mark.skipif(
    not compat.SEGMENTS_ARE_FREED, reason="steps are cut with JAX 0.12 or newer"
)
def test_gradients_wait_on_the_host_where_that_saves_anything():
    """As many as fit beside the most that a step keeps elsewhere do on the device."""
    tx = clipped("before")

    def waiting(batch, **options):
        args = matrices(), tx.init(matrices()), jnp.ones((batch, WIDTH))
        return len(cut(train_step(tx), *args, **options)[0].waiting)

    some = waiting(8)
    assert 0 < some < LAYERS - 1
    assert waiting(8 * WIDTH) == 0
    assert waiting(8 * WIDTH, late_gradients="host") == LAYERS - 1
    assert waiting(8, late_gradients="device") == 0


@pytest.mark.skipif(
    not compat.SEGMENTS_ARE_FREED, reason="steps are cut with JAX 0.12 or newer"
)
def test_residuals_at_rest_leave_no_room_for_gradients():
    """Where the most would be alive they are not, so that fewer fit beside it."""
    tx = clipped("before")

    def waiting(residuals):
        args = matrices(8), tx.init(matrices(8)), jnp.ones((WIDTH, WIDTH))
        return len(cut(train_step(tx), *args, residuals=residuals)[0].waiting)

    assert waiting("device") < waiting("host")


def test_norms_of_single_gradients_need_no_other():
    """What a clip of each leaf's own scales is updated in the turn after, too."""
    tx = optax.chain(optax.clip_by_block_rms(0.1), adam_at_rest())
    args = matrices(), tx.init(matrices()), jnp.ones((4, WIDTH))
    found, _ = cut(train_step(tx), *args, late_gradients="host")
    assert updated(found) == ([*[0] * LAYERS, *[3] * LAYERS], [1])


def test_updates_that_need_no_other_gradient_free_theirs(monkeypatch):
    """Without turns too: of 12 layers on an H100 they took 1295 MiB instead of 876.

    That a norm of all is returned keeps none of them waiting.
    """
    limited(monkeypatch, least_freed_bytes=1)
    tx, layers = adam_at_rest(), matrices(8)

    def step(layers, state, x):
        grads = jax.grad(loss)(layers, x)
        updates, state = tx.update(grads, state, layers)
        return optax.apply_updates(layers, updates), state, optax.tree.norm(grads)

    args = layers, tx.init(layers), jnp.ones((4, WIDTH))
    plan = oo.jit(step, donate_argnums=(0, 1)).schedule(*args)
    assert plan.chain is None
    assert "would lower the peak by 0 B" in str(plan)


@pytest.mark.parametrize("where", ["before", "inside"])
def test_state_alone_at_rest(where, monkeypatch):
    """Turns are of gradients, and parameters are replaced where they are."""
    tx = clipped(where)
    layers = matrices(8)
    args = layers, tx.init(layers), jnp.ones((4, WIDTH))
    step = oo.jit(train_step(tx), donate_argnums=(0, 1))
    limited(monkeypatch, least_freed_bytes=3 * MATRIX_BYTES)
    found = step.schedule(*args).chain
    assert found is not None
    assert found.waiting
    inside, between = updated(found)
    assert sum(inside) + sum(between) == 3 * 8 + 1 + len(found.waiting)
    lefts = [node.left for s in found.segments for node in s.updates if node.left]
    lefts += [x.left for link in found.links if isinstance(link, tuple) for x in link]
    aliases = [
        x.update.outputs[k].alias is not None
        for x in lefts
        if x and not x.update.only_stores
        for k, v in enumerate(x.results)
        if v.aval.shape == WEIGHT
    ]
    assert aliases == [True] * 3 * 8
    for least, part in [(8 * MATRIX_BYTES, 0), (0, 1)]:
        limited(monkeypatch, least_freed_bytes=least, least_freed_part=part)
        plan = step.schedule(*args)
        assert plan.chain is None
        (reason,) = plan.reasons()
        assert reason.startswith("layers that no scan runs are not cut into turns: gr")


def test_no_turn_runs_twice():
    """It is said where that was asked for."""
    tx = clipped("before")
    args = matrices(), tx.init(matrices()), jnp.ones((4, WIDTH))
    step = oo.jit(train_step(tx), late_gradients="recompute")
    args = oo.set_memory_kind(args[0], ".*", "pinned_host"), *args[1:]
    with pytest.warns(UserWarning, match="'recompute' was asked for, and cannot"):
        step(*args)


def test_what_has_no_room_is_updated_between_turns():
    """In slices, as where a step is not cut: in the window that was asked for."""
    tx = oo.offload(
        optax.adam(1e-2), oo.Rule(".*", min_bytes=0), window_bytes=3 * MATRIX_BYTES - 1
    )
    args = matrices(), tx.init(matrices()), jnp.ones((4, WIDTH))
    found, _ = cut(train_step(tx), *args)
    inside, between = updated(found)
    assert not any(inside)
    assert between == [1, *[3] * LAYERS]


def test_much_is_loaded_by_the_turn_that_updates_it(monkeypatch):
    """Beside its products, so that it need not be there before: only what it shares."""
    tx = oo.offload(optax.adam(1e-2), oo.Rule(".*", min_bytes=0))
    args = matrices(), tx.init(matrices()), jnp.ones((4, WIDTH))
    before, _ = cut(train_step(tx), *args)
    limited(monkeypatch, turn_bytes=3 * MATRIX_BYTES - 1, least_tied_bytes=1)
    limited(monkeypatch, most_products=100)  # However short a product is.
    found, _ = cut(train_step(tx), *args)
    inside, between = updated(found)
    assert sum(inside) + sum(between) == sum(map(sum, updated(before)))
    assert sum(x > 0 for x in inside) == LAYERS - 2  # The others have few products.
    assert "or by itself beside its products (2.00 KiB at most)" in next(found.lines())
    for n, s in enumerate(found.segments):
        begun = {x.result: k for k, tie in enumerate(s.ties) for x in tie.loads}
        own = [v for v in begun if v in s.own]
        assert len(own) == 2 * bool(s.updates)
        assert not {*own}.intersection(found.segments[n - 1].ahead)
        stored = [k for k, tie in enumerate(s.ties) if tie.updates]
        assert all(begun[v] < min(stored) for v in own)


def test_little_is_loaded_ahead_for_a_turn_that_little_fills(monkeypatch):
    """What fills a turn is on the device a few times, and no more."""
    tx = oo.offload(optax.adam(1e-2), oo.Rule(".*", min_bytes=0))
    args = matrices(), tx.init(matrices()), jnp.ones((4, WIDTH))
    limited(monkeypatch, least_tied_bytes=1)

    def most_ahead(rooms):
        limited(monkeypatch, turn_rooms=rooms)
        found, _ = cut(train_step(tx), *args)
        return max(sum(nbytes(v.aval) for v in s.ahead) for s in found.segments)

    assert most_ahead(1) < most_ahead(100)


def test_what_takes_much_is_updated_where_little_is_alive(monkeypatch):
    """A head, if residuals are many; between turns, in slices, if they are few."""
    limited(monkeypatch, least_freed_bytes=0, least_freed_part=1 / 20, turn_rooms=64)
    tx, head = adam_at_rest(), jnp.ones((WIDTH, 4 * WIDTH))

    def head_loss(params, x):
        for w in params[:-1]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x @ params[-1]) ** 2)

    def turns_between(tokens):
        params = [*matrices(24), head]
        step = train_step(tx, jax.grad(head_loss))
        found, of = cut(step, params, tx.init(params), jnp.ones((tokens, WIDTH)))
        made, updated = [], []
        for n, s in enumerate(found.segments):
            own = [v for i in s.positions for v in of.defines(i)]
            new = [v for x in s.updates for v in x.defines]
            made += [n for v in own if v.aval.shape == head.shape]
            updated += [n for v in new if v.aval.shape == head.shape]
        return {n - max(made) for n in updated}

    # It is little of what residuals take, and as much as a few of them.
    assert max(turns_between(20 * WIDTH)) <= 2
    assert min(turns_between(5 * WIDTH)) > 8
    assert not turns_between(4)


def test_what_is_moved_beside_which_product():
    """In proportion to their work: the large with the long."""
    v = [jax.extend.core.Var(jax.core.ShapedArray((), jnp.float32)) for _ in range(20)]
    products = [Product(n, v[n], work) for n, work in enumerate([10, 100, 10, 100])]
    loads = [Move(v[10], 1), Move(v[11], 9), Move(v[12], 1), Move(v[13], 8)]
    updates = [
        Stored((Move(v[14], 9), Move(v[15], 1)), (v[5],)),
        Stored((Move(v[16], 1),), (v[6],)),
    ]
    found = ties.ties(products, loads, updates)
    assert [[x.result for x in tie.loads] for tie in found] == [
        *([v[10]], [v[11]], [v[12]], [v[13]])
    ]
    moved = [[x.result for x in tie.updates] for tie in found]
    assert moved == [[], [v[14]], [], [v[15], v[16]]]
    # What began before is there when the next begins, of each way.
    assert [set(tie.landed) for tie in found] == [
        *(set(), {v[10]}, {v[11]}, {v[12], v[14]})
    ]
    assert not any(tie.loads or tie.updates for tie in ties.ties([], loads, updates))


def test_short_products_are_taken_together():
    """Half of the largest move is hidden by each, and of residuals by the last."""
    v = [jax.extend.core.Var(jax.core.ShapedArray((), jnp.float32)) for _ in range(9)]
    works = [30, 10, 30, 10, 20]
    products = [
        Product(n, v[n], work, (v[n + 4],) * (n == 3)) for n, work in enumerate(works)
    ]
    moves = [Move(v[5], 40), Move(v[6], 60)]

    def together(*args):
        found = ties.together(products, *args)
        return [(x.position, x.work) for x in found]

    assert together(moves, []) == [(0, 30), (1, 40), (3, 30)]
    assert together([Move(v[5], 1)] * 100, []) == [*enumerate(works)]
    assert together(moves, [Move(v[7], 62)]) == [(0, 40), (2, 60)]
    assert together([], []) == [*enumerate(works)]
    # What one of them would have waited for is waited for with the next.
    assert ties.together(products, moves, [])[-1].before == (v[7],)
    assert ties.together(products[2:], moves, [])[-1].before == (v[7],)


def test_what_an_update_takes_is_loaded_before_it_is_stored():
    """Beside one of the two products before that which has more room."""
    v = [jax.extend.core.Var(jax.core.ShapedArray((), jnp.float32)) for _ in range(20)]
    products = [Product(n, v[n], work) for n, work in enumerate([10, 100, 10, 100])]
    updates = [
        Stored((Move(v[14], 4),), (v[5],), (Move(v[10], 4),)),
        Stored((Move(v[15], 4),), (v[6],), (Move(v[11], 4), Move(v[12], 4))),
    ]
    found = ties.ties(products, [Move(v[13], 1)], updates)
    begun = {x.result: k for k, tie in enumerate(found) for x in tie.loads}
    stored = {x.result: k for k, tie in enumerate(found) for x in tie.updates}
    assert len(begun) == 4
    assert stored[v[14]] - 2 <= begun[v[10]] < stored[v[14]]
    for taken in (v[11], v[12]):
        assert stored[v[15]] - 2 <= begun[taken] < stored[v[15]]
    # One product hides nothing before its store: it is loaded at first.
    (tie,) = ties.ties(products[:1], [], updates)
    assert not tie.loads
    assert not tie.updates


def test_what_is_read_later_is_not_replaced_before():
    """A parameter that two layers share is updated when the first has read it."""

    def shared(layers, x):
        return loss([*layers, *layers], x)

    found, step = cut(jax.grad(shared), matrices(3), jnp.ones((4, WIDTH)))
    assert loads(step, found.segments)[:6] == [[i] for i in [0, 1, 2, 0, 1, 2]]
    assert loads(step, found.segments)[6:] == [[1], [0], [2], [1]]


def test_averages_that_the_model_takes_are_replaced_after_that():
    """Nothing that they are made of waits for a gradient, as in a target network."""

    def averaged(updates, state, params=None):
        return updates, jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, state, params)

    inner = optax.GradientTransformation(lambda p: p, averaged)
    tx = oo.offload(inner, oo.Rule(".*", min_bytes=0))

    def step(layers, state, x):
        value = loss([*layers, *state], x)
        _, state = tx.update(layers, state, layers)
        return state, value

    found, _ = cut(step, matrices(), tx.init(matrices()), jnp.ones((4, WIDTH)))
    replaced = [{*s.replaced.values()} for s in found.segments]
    assert any(replaced)
    for n, places in enumerate(replaced):
        assert not any(places & {*s.loads} for s in found.segments[n + 1 :])


def test_averages_of_new_parameters_are_made_with_them():
    """In the turn of their update, and so no update is on the device beside it."""
    tx = adam_at_rest()

    def step(both, state, x):
        layers, average = both
        updates, state = tx.update(jax.grad(loss)(layers, x), state, layers)
        layers = optax.apply_updates(layers, updates)
        average = jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, layers)
        return (layers, average), state

    args = (matrices(), matrices()), tx.init(matrices()), jnp.ones((4, WIDTH))
    found, _ = cut(step, *args)
    inside, between = updated(found)
    assert sum(inside) + sum(between) == 4 * LAYERS + 1
    places = [v for s in found.segments for v in s.replaced.values()]
    assert len({*places}) == len(places)


@pytest.mark.parametrize("residuals", ["device", "host"])
def test_residuals_rest_until_they_are_taken(residuals):
    """Those that are taken two segments on or later, by the one that makes them."""
    x = jnp.ones((4, WIDTH))
    found, _ = cut(jax.grad(loss), matrices(), x, residuals=residuals)
    if residuals == "device":
        assert not found.residuals
        return
    assert found.residuals
    made = {v: n for n, s in enumerate(found.segments) for v in s.stores}
    for n, s in enumerate(found.segments):
        for v in s.loads:
            if v in made:
                assert n > made[v] + 1
                assert v in found.segments[n - 1].ahead
                assert v not in s.own
        assert not set(s.stores) & set(s.loads)


def test_what_the_last_layer_computes_again_is_no_residual():
    """However much of it there is, before any gradient is complete."""

    def layer(x, w):
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    def loss(layers, x):
        for w in layers:
            x = jax.checkpoint(layer)(x, w)
        return jnp.mean(x**2)

    wide = jnp.ones((WIDTH, 4 * WIDTH))
    layers = [{"gate": wide, "up": wide, "down": wide.T}] * LAYERS
    x = jnp.ones((4 * WIDTH, WIDTH))
    found, _ = cut(jax.grad(loss), layers, x, residuals="host")
    assert {v.aval.shape for v in found.residuals} == {x.shape}


def test_what_a_layer_takes_of_its_own_is_no_residual(monkeypatch):
    """However large it is, where the forward pass has most alive: as probabilities.

    Turns that have room for it would be too few.
    """
    limited(monkeypatch, least_segments=LAYERS)

    def layer(x, w):
        y = (x @ w).reshape(1, len(x), 2, WIDTH // 2)
        y = jax.nn.dot_product_attention(y, y, y, is_causal=True)
        return x + y.reshape(x.shape)

    def loss(layers, x):
        for w in layers:
            x = jax.checkpoint(layer)(x, w)
        return jnp.mean(x**2)

    x = jnp.ones((64 * WIDTH, WIDTH))
    found, _ = cut(jax.grad(loss), matrices(), x, residuals="host")
    assert {v.aval.shape for v in found.residuals} == {x.shape}


def test_residuals_are_stored_by_the_next_turn_if_it_takes_them():
    """Beside its products, and not at the end of the turn that makes them."""
    x = jnp.ones((4, WIDTH))
    found, step = cut(jax.grad(loss), matrices(8), x, residuals="host")
    equations = step.program.equations
    behind = 0
    for before, s in itertools.pairwise(found.segments):
        for v in s.stores:
            made_here = any(v in equations[i].outvars for i in s.positions)
            behind += not made_here
            assert made_here or v in before.results
    assert behind


@pytest.mark.parametrize("layer", [jnp.tanh, jax.checkpoint(jnp.tanh)])
def test_residuals_of_each_backward_pass_rest(layer):
    """Of microbatches in a Python loop, and of a gradient that is taken twice."""

    def loss(layers, x):
        for w in layers:
            x = layer(x @ w)
        return jnp.mean(x**2)

    def of_two(layers, x):
        grads = [jax.grad(loss)(layers, half) for half in jnp.split(x, 2)]
        return jax.tree.map(jnp.add, *grads)

    def again(layers, x):
        grads = jax.grad(loss)(layers, x)
        return jax.grad(loss)(jax.tree.map(jnp.add, layers, grads), x)

    def long(tokens):
        return jnp.ones((tokens * WIDTH, WIDTH))

    once, _ = cut(jax.grad(loss), matrices(), long(16), residuals="host")
    for fn, x in ((of_two, long(32)), (again, long(16))):
        found, _ = cut(fn, matrices(), x, residuals="host")
        assert len(found.residuals) >= 2 * len(once.residuals) - 2


def test_few_layers_are_cut_however_long_a_sequence_is(monkeypatch):
    """Turns are longer only where enough of them are left."""
    limited(monkeypatch, much_alive_bytes=0, most_share=1, least_segments=8)

    def segments(tokens):
        found, _ = cut(jax.grad(loss), matrices(12), jnp.ones((tokens, WIDTH)))
        return len(found.segments)

    assert segments(64 * WIDTH) == segments(1) >= 8
    limited(monkeypatch, least_segments=3)
    assert segments(64 * WIDTH) < segments(1)


def test_a_derivative_that_is_derived_again_is_of_the_forward_pass():
    """As in a gradient penalty."""

    def penalty(w, x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x) ** 2)

    args = jnp.ones(WEIGHT), jnp.ones((4, WIDTH))
    jaxpr = jax.make_jaxpr(jax.grad(penalty))(*args)
    found = [follow.is_transposed_last(e) for e in jaxpr.eqns]
    again = ["transpose(" in str(e.source_info.name_stack) for e in jaxpr.eqns]
    assert sum(again) > sum(found) > 0
    assert not found[again.index(True)]


def skipping(layers, x):
    """A forward pass whose later layers take what the earlier made, as a U-Net's."""
    made = []
    for w in layers:
        made.append(x := jnp.tanh(x @ w))
    for w in layers:
        x = x + made.pop() @ w
    return x


def test_residuals_are_cut_for_where_nothing_else_rests():
    """What layers hand on fills segments where it is made, and where it is taken."""
    layers, tx = matrices(6), adam_at_rest()
    args = layers, tx.init(layers), jnp.ones((WIDTH, WIDTH))
    plan = oo.jit(train_step(tx), residuals="host").schedule(*args)
    found = plan.chain
    assert found is not None
    stored = [v for s in found.segments for v in s.stores]
    # The last ones are taken soon; of how many depends on JAX's derivative of tanh.
    assert len(layers) - 2 <= len(stored) <= len(layers)
    # Not what a later turn computes again of these.
    producers = plan.step.program.producers
    made = {*names(plan.step, (producers[v] for v in stored))}
    # A derivative of JAX 0.10.2's, whose steps are not cut, has a sum besides.
    assert made == {"tanh"} or (not SEGMENTS_ARE_FREED and made == {"tanh", "add_any"})
    assert not found.segments[0].own
    assert oo.jit(train_step(tx)).schedule(*args).chain is None
    # Without an update JAX says where the backward pass begins.
    plan = oo.jit(jax.grad(loss), residuals="host").schedule(layers, args[2])
    assert plan.chain is not None
    assert plan.chain.residuals
    # And without a backward pass nothing waits for one.
    fused = oo.jit(skipping, residuals="host")
    with pytest.warns(oo.OffloadWarning, match="nothing is kept there"):
        assert fused.schedule(layers, args[2]).chain is None


def test_what_a_layer_computes_again_is_no_residual():
    """It is used up before the next layer, though some turns later."""

    def checkpointed(layers, x):
        for pair in zip(layers[::3], layers[1::3], layers[2::3], strict=True):
            x = jax.checkpoint(lambda x, pair: loss_free(pair, x))(x, pair)
        return jnp.mean(x**2)

    def loss_free(layers, x):
        for w in layers:
            x = jnp.tanh(x @ w)
        return x

    layers = matrices(4 * 3)
    x = jnp.ones((4, WIDTH))
    found, _ = cut(jax.grad(checkpointed), layers, x, residuals="host")
    making = [n for n, s in enumerate(found.segments) if s.stores]
    # In the last layer's turns the most is alive.
    assert 0 < max(making) < len(layers) + 3
    assert len(found.segments) > 2 * len(layers)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"residuals": "host"},
        {"late_gradients": "host"},
        {"parameters": True},
    ],
)
def test_a_step_of_few_gradients_is_not_searched(asked, monkeypatch):
    """Where nothing but state rests, and turns could free no more than these."""
    limited(monkeypatch, least_freed_bytes=2 * LAYERS * MATRIX_BYTES + 1)
    tx = oo.offload(optax.adam(1e-2), oo.Rule(".*", min_bytes=0))
    options = {k: v for k, v in asked.items() if k != "parameters"}
    args = matrices(), tx.init(matrices()), jnp.ones((4, WIDTH))
    if "parameters" in asked:
        args = oo.set_memory_kind(args[0], ".*", "pinned_host"), *args[1:]
    plan = oo.jit(train_step(tx), **options).schedule(*args)
    assert ("lower the peak by at most 5.00 KiB" in plan.uncut) == (not asked)
    limited(monkeypatch, least_freed_bytes=2 * LAYERS * MATRIX_BYTES)
    plan = oo.jit(train_step(tx), **options).schedule(*args)
    assert "at most" not in plan.uncut


def test_residuals_made_after_the_most_is_alive_stay():
    """As after a layer that has far more of its own: they are not there with it."""

    def loss_with(much):
        def loss(layers, x):
            for i, w in enumerate(layers):
                x = jnp.tanh(x @ w)
                if i == 1:
                    own = jnp.tanh(x @ jnp.ones((WIDTH, much)))
                    x = x + jax.lax.stop_gradient(own @ jnp.ones((much, WIDTH)))
            return jnp.mean(x**2)

        return jax.grad(loss)

    args = matrices(8), jnp.ones((4, WIDTH))
    little, much = (
        cut(loss_with(n), *args, residuals="host")[0].residuals for n in (1, 1024)
    )
    assert 0 < len(much) < len(little)


def test_new_parameters_that_are_evaluated():
    """They are on the device until then, which is said."""
    tx = oo.offload(optax.adam(1e-2), oo.Rule(".*", min_bytes=0))
    args = matrices(), tx.init(matrices()), jnp.ones((4, WIDTH))
    once = train_step(tx)

    def step(layers, state, x):
        layers, state = once(layers, state, x)
        return layers, state, loss(layers, x)

    kept = {fn: cut(fn, *args)[0] for fn in (once, step)}
    assert kept[once].most_kept == 0
    # The first layer's are used in the turn in which they are made.
    assert kept[step].most_kept == (LAYERS - 1) * MATRIX_BYTES
    said = "4.00 KiB of what updates make is on the device until the step has used it"
    assert [x.startswith(said) for x in kept[step].lines()].count(True) == 1
    assert not any("updates make" in x for x in kept[once].lines())


def test_new_parameters_that_are_averaged():
    """None waits: an average is taken as soon as they are there."""
    tx = oo.offload(optax.adam(1e-2))
    once = train_step(tx)

    def step(layers, state, average, x):
        layers, state = once(layers, state, x)
        return layers, state, optax.incremental_update(layers, average, 0.1)

    def layers():
        return [jax.ShapeDtypeStruct((256, 256), jnp.float32) for _ in range(LAYERS)]

    state = oo.eval_shape(tx.init, layers())
    x = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    plan = cut(step, layers(), state, layers(), x)[0]
    assert plan.between[-1]
    assert plan.most_kept == 0


def test_what_is_printed():
    """How the step was cut, instead of advice to write a scan."""
    tx = oo.offload(optax.adam(1e-2), oo.Rule(".*", min_bytes=0))
    state = tx.init(matrices())
    at_rest = oo.set_memory_kind(matrices(), ".*", "pinned_host")
    x = jnp.ones((4, WIDTH))
    step = oo.jit(train_step(tx), residuals="host")
    plan = step.schedule(at_rest, state, x)
    assert plan.chain is not None
    lines = str(plan).splitlines()
    (line,) = [line for line in lines if "turns of layers" in line]
    most = max(sum(nbytes(v.aval) for v in s.loads) for s in plan.chain.segments)
    assert most > MATRIX_BYTES
    turns = len(plan.chain.segments)
    assert line == (
        f"{turns} turns of layers that no scan runs, each a loop that runs once: "
        f"{size_text(most)} of what rests on the host at most in one, loaded by the "
        "turn before"
    )
    alone = dataclasses.replace(plan.chain.segments[0], alone=True)
    said, *_ = dataclasses.replace(plan.chain, links=(alone,)).lines()
    assert said.endswith("the turn before, but after 1 in which the most is in memory")
    assert any("residuals rest on the host between the turns" in x for x in lines)
    assert not any("no scan found" in x or "nothing is fused" in x for x in lines)
    # What turns update is not said to be left.
    left = [node.left for node in plan.chain.between if node.left]
    said = [g for x in plan.schedules() for y in x.straights() for g in y.groups]
    assert len(said) < LAYERS
    assert bool(left) == any("what is left" in line for line in lines)


def test_outputs_that_arrays_join():
    """Each leaf's state with its parameter; numbers alone together."""

    def update(a, b, count, mu_a, mu_b):
        mu_a, mu_b = 0.9 * mu_a + a, 0.9 * mu_b + b
        return mu_a / count, mu_b / count, count + 1, mu_a, mu_b

    found = update_of(update, [(4,), (4,)], [(), (4,), (4,)])
    assert independent(found) == [([0, 3], [0, 3]), ([1, 4], [1, 4]), ([2], [])]

    def scaled(a, b, mu):
        norm = jnp.sqrt(jnp.sum(a**2) + jnp.sum(b**2))
        return a / norm, b / norm, mu + a / norm

    found = update_of(scaled, [(4,), (4,)], [(4,)])
    assert independent(found) == [([0, 1, 2], [0, 1, 2])]


def test_parameters_that_decay_are_loaded_by_the_update():
    """Beside the gradients that they are added to, and not all of them before it."""
    decay = optax.add_decayed_weights(0.1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), decay, adam_at_rest())
    args = matrices(), tx.init(matrices()), jnp.ones((4, WIDTH))
    found, step = cut(train_step(tx), *args, late_gradients="host")
    lefts = [x.left for link in found.links if isinstance(link, tuple) for x in link]
    lefts += [x.left for s in found.segments for x in s.updates]
    taken = [a for x in lefts if x for a in x.operands if a.aval.shape == WEIGHT]
    # What is not at rest is a gradient, and nothing is made of a parameter.
    made = [step.program.producers[a] for a in taken if a in step.program.producers]
    assert made
    assert not {"mul", "convert_element_type"} & {*names(step, made)}


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("taken", [False, True])
def test_what_decodes_layers_is_where_they_are_taken(taken, computed):
    """Forward and backward, although it is written before all of them.

    What it makes fills a segment, and not its codes.
    """

    def look_up(table, codes):
        return jnp.take(table, codes, axis=0) if taken else table[codes]

    def decode(layer):
        codes, scale = layer
        table = jnp.asarray(np.linspace(-1, 1, 16, dtype=np.float32))
        if computed:
            table = jnp.arange(16.0) / 7.5 - 1
        low, high = look_up(table, codes & 15), look_up(table, codes >> 4)
        numbers = jnp.stack([low, high], -1) if taken else jnp.concatenate([low, high])
        return (numbers.reshape(WIDTH, WIDTH) * scale).astype(jnp.float32)

    def of_codes(layers, x):
        return loss(list(map(decode, layers)), x)

    codes = jnp.arange(WIDTH * WIDTH // 2, dtype=jnp.uint8).reshape(-1, WIDTH)
    layers = [(codes, jnp.full((WIDTH, 1), 0.5, jnp.bfloat16)) for _ in range(LAYERS)]
    x = jnp.ones((4, WIDTH))
    found, step = cut(jax.grad(of_codes, 1), layers, x)
    forward = list(range(LAYERS))
    pairs = [[2 * i, 2 * i + 1] for i in [*forward, *forward[-2::-1]]]
    assert list(map(sorted, loads(step, found.segments))) == pairs
    decoded = [v for s in found.segments for v in s.results if v.aval.shape == WEIGHT]
    assert not decoded


def attention_backward(tokens):
    """The equations of a gradient of attention, and its products' positions."""

    def gradients(p, k, v, ct):
        more = ct @ v.T
        return p.T @ ct, (p * more) @ k

    args = [jnp.ones((tokens, n)) for n in (tokens, 4, 4, 4)]
    program = flatten(jax.make_jaxpr(gradients)(*args))
    positions = range(len(program.equations))
    return program, [i for i in positions if flops_of(program.equations[i])]


def assert_in_order(program, positions):
    """All equations are there, each after those that make what it takes."""
    assert sorted(positions) == [*range(len(program.equations))]
    known = {*program.invars, *program.constants}
    for i in positions:
        e = program.equations[i]
        assert known.issuperset(x for x in e.invars if isinstance(x, jex.Var))
        known.update(e.outvars)


@pytest.mark.parametrize("seed", range(40))
def test_what_comes_first_has_what_it_takes(seed):
    """Whatever moves, in random products of matrices of many sizes."""
    rng = np.random.default_rng(seed)

    def chosen(*args):
        some = list(args)
        for _ in range(24):
            a, b = (some[i] for i in rng.integers(len(some), size=2))
            if rng.random() < 0.4:
                some.append(a * 2)
            elif a.shape[0] == b.shape[0]:
                some.append(a.T @ b)
            elif a.shape[1] == b.shape[1]:
                some.append(a @ b.T)
        return some

    sizes = rng.choice([1, 8, 64], size=(4, 2))
    closed = jax.make_jaxpr(chosen)(*(jnp.ones(tuple(x)) for x in sizes))
    program = flatten(closed)
    assert_in_order(program, ties.small_first(program, range(len(program.equations))))


def test_effects_stay_where_they_are():
    """A print between two products keeps these in their order."""

    def gradients(p, v, ct):
        more = ct @ v.T
        jax.debug.print("{}", ct[0, 0])
        return more, p.T @ ct

    args = [jnp.ones((32, n)) for n in (32, 4, 4)]
    program = flatten(jax.make_jaxpr(gradients)(*args))
    positions = (*range(len(program.equations)),)
    assert ties.small_first(program, positions) == positions


def test_products_of_small_results_come_first():
    """That of the values is there before that of probabilities, which are many."""
    program, some = attention_backward(32)
    found = ties.small_first(program, range(len(program.equations)))
    assert_in_order(program, found)

    def sizes(positions):
        products = (program.equations[i] for i in positions if i in some)
        return [e.outvars[0].aval.size for e in products]

    many, few = 32 * 32, 32 * 4
    assert sizes(range(len(program.equations))) == [many, few, few]
    assert sizes(found) == [few, many, few]
    segment = Segment(found, {})
    (large,) = (x for x in ties.products(program, segment) if x.large)
    assert sizes([large.position]) == [many]
    # However short it is, it waits for the other one.
    kept = ties.together(ties.products(program, segment), [Move(found, 10**9)], [])
    assert large.position in [x.position for x in kept]
    program, _ = attention_backward(8)
    positions = range(len(program.equations))
    assert ties.small_first(program, positions) == (*positions,)
