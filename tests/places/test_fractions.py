"""Rules that say how much of what they match moves: the same leaves everywhere."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import committed, make_params
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_offload as oo
from optax_offload._ground import trees
from optax_offload._low_bit import encoded_parts
from optax_offload._places import memory
from optax_offload._places.rules import as_config, decide

MIB = 2**20


def moved(rules, leaves):
    """The paths that rules put into host memory."""
    placed = decide(as_config(rules), leaves)
    return [
        path
        for (path, _), p in zip(leaves, placed, strict=True)
        if p.memory_kind == "pinned_host"
    ]


def on_host(tree):
    """The paths of the leaves that are in host memory."""
    return [
        path
        for path, x in trees.leaves_with_paths(tree)
        if memory.memory_kind_of(x) == "pinned_host"
    ]


SIZES = [("a", 1 * MIB), ("b", 4 * MIB), ("c", 2 * MIB), ("d", 1 * MIB)]


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (1e-9, ["b"]),
        (0.5, ["b"]),
        (0.51, ["b", "c"]),
        (0.75, ["b", "c"]),
        (0.76, ["a", "b", "c"]),
        (0.99, ["a", "b", "c", "d"]),
        (1, ["a", "b", "c", "d"]),
    ],
)
def test_the_largest_leaves_move_until_the_share_is_reached(fraction, expected):
    """Of equal ones the first by path; what comes to it exactly is enough."""
    assert moved(oo.Rule(".*", fraction=fraction), SIZES) == expected
    backwards = SIZES[::-1]
    assert sorted(moved(oo.Rule(".*", fraction=fraction), backwards)) == expected


def test_a_share_is_the_number_as_it_is_written():
    """As a binary number 0.07 is more than 7 of 100, and 0.29 less than 29."""
    leaves = [(f"{i:02}", MIB) for i in range(100)]
    for fraction in (0.07, 0.29, 0.57):
        rule = oo.Rule(".*", fraction=fraction)
        assert len(moved(rule, leaves)) == round(100 * fraction)


def test_the_others_stay():
    """The rule has decided about them: no later rule does."""
    rules = [oo.Rule("[ab]", fraction=0.5), oo.Rule(".*")]
    assert moved(rules, SIZES) == ["b", "c", "d"]
    rules = [oo.Rule("b", "device"), oo.Rule("[acd]", fraction=0.5)]
    assert moved(rules, SIZES) == ["c"]


def test_the_share_is_of_what_the_rule_would_move():
    """Leaves that are too small, empty or random keys are neither moved nor counted."""
    leaves = [("big", 4 * MIB), ("big2", 4 * MIB), ("key", None), ("empty", 0)]
    leaves += [(f"small{i}", MIB) for i in range(100)]
    rule = oo.Rule(".*", min_bytes=2 * MIB, fraction=0.5)
    assert moved(rule, leaves) == ["big"]
    assert moved(rule, leaves[2:]) == []


def test_parts_of_an_encoded_leaf_move_together():
    """As one leaf of the bytes that move: codes and scales."""
    leaves = [("mu/codes_int8", 3 * MIB), ("mu/scales", 2 * MIB), ("nu", 4 * MIB)]
    rule = oo.Rule(".*", fraction=0.5)
    assert moved(rule, leaves) == ["mu/codes_int8", "mu/scales"]
    # Scales under the bound stay, and the leaf is as large as its codes.
    rule = oo.Rule(".*", min_bytes=3 * MIB, fraction=0.5)
    assert moved(rule, leaves) == ["nu"]


def test_reasons():
    """They say what share moves, in words that leaves have in common."""
    placed = decide(as_config(oo.Rule(".*", fraction=0.6)), SIZES)
    assert {p.why for p in placed} == {
        "the largest 6.00 MiB of 8.00 MiB, for fraction 0.6 (rule 0 '.*')",
        "beyond the largest 6.00 MiB of 8.00 MiB, for fraction 0.6 (rule 0 '.*')",
    }
    assert {p.rule for p in placed} == {oo.Rule(".*", fraction=0.6)}


@pytest.mark.parametrize(
    ("fraction", "error"),
    [
        (0, "fraction is 0; it must be a number above 0 and at most 1"),
        (-0.5, "fraction is -0.5; it must be a number above 0"),
        (1.5, "fraction is 1.5; it must be a number above 0"),
        (float("nan"), "fraction is nan"),
        (float("inf"), "fraction is inf"),
        (True, "fraction is True"),
        ("0.5", "fraction is '0.5'"),
        (None, "fraction is None"),
        (50, r"fraction is 50; .* at most 1, such as 0\.5 for half of the bytes"),
        (np.array([0.5]), r"fraction is array\(\[0\.5\]\)"),
    ],
)
def test_bad_fractions(tmp_path, fraction, error):
    """Each is named with what is allowed; in a file with its place there too."""
    with pytest.raises(ValueError, match=error):
        oo.Rule(".*", fraction=fraction)
    if not isinstance(fraction, (np.ndarray, type(None))):
        file = tmp_path / "c.toml"
        text = str(fraction).lower() if not isinstance(fraction, str) else "'0.5'"
        file.write_text(f"[[rules]]\npattern = 'a'\nfraction = {text}\n")
        with pytest.raises(ValueError, match=r"c\.toml: rules\[0\]\." + error[:11]):
            oo.load_config(file)


def test_a_rule_that_moves_nothing_has_no_share():
    """With kind device nobody could say which leaves were meant."""
    message = "fraction is 0.5 in a rule with memory_kind 'device', which moves nothing"
    with pytest.raises(ValueError, match=message):
        oo.Rule(".*", "device", fraction=0.5)
    assert oo.Rule(".*", "device", fraction=1.0) == oo.Rule(".*", "device")


@pytest.mark.parametrize("fraction", [np.float32(0.5), np.float64(0.5), 0.5])
def test_numbers_of_other_libraries(fraction):
    """They are numbers, and two rules with the same one are equal."""
    assert oo.Rule(".*", fraction=fraction) == oo.Rule(".*", fraction=0.5)


def test_files(tmp_path):
    """For state and for parameters."""
    file = tmp_path / "c.toml"
    file.write_text(
        "[[rules]]\npattern = 'a'\nfraction = 0.25\nmin_bytes = 8\n"
        "[[rules]]\npattern = 'b'\nfraction = 1\n"
        "[[parameters]]\npattern = 'layers/.*'\nfraction = 0.5\nmin_bytes = 8\n"
    )
    config = oo.load_config(file)
    assert config.rules == (
        oo.Rule("a", fraction=0.25, min_bytes=8),
        oo.Rule("b"),
    )
    params = {"layers": {"big": jnp.ones(64), "small": jnp.ones(32)}}
    placed = oo.place(params, config.parameters)
    assert on_host(placed) == ["layers/big"]


names = st.text("ab/01", min_size=1, max_size=4)


@settings(deadline=None)
@given(
    st.dictionaries(names, st.integers(0, 50), min_size=1),
    st.floats(0.01, 1),
    st.integers(0, 20),
    st.randoms(),
)
def test_any_leaves(sizes, fraction, min_bytes, random):
    """Enough bytes, none to spare, the largest first; in whatever order they come."""
    rule = oo.Rule(".*", fraction=fraction, min_bytes=min_bytes)
    leaves = list(sizes.items())
    chosen = moved(rule, leaves)
    eligible = {p: n for p, n in leaves if n and n >= min_bytes}
    ranked = sorted(eligible, key=lambda p: (-eligible[p], p))
    assert set(chosen) == set(ranked[: len(chosen)])
    total, got = sum(eligible.values()), sum(sizes[p] for p in chosen)
    assert got >= fraction * total * (1 - 1e-12)
    if chosen:
        last = sizes[ranked[len(chosen) - 1]]
        assert got - last < fraction * total * (1 + 1e-12)
    random.shuffle(leaves)
    assert set(moved(rule, leaves)) == set(chosen)


TREES = {
    "adam": lambda tx: tx(optax.adam(1e-3)),
    "masked_inside": lambda tx: tx(
        optax.masked(
            optax.adam(1e-3), {"embed": True, "layers_9": False, "layers_10": True}
        )
    ),
    "masked_outside": lambda tx: optax.masked(
        tx(optax.adam(1e-3)), {"embed": True, "layers_9": True, "layers_10": False}
    ),
    "partition": lambda tx: tx(
        optax.partition(
            {"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)},
            {"embed": "a", "layers_9": "b", "layers_10": "b"},
        )
    ),
    "multi_steps": lambda tx: tx(optax.MultiSteps(optax.adamw(1e-3), 2)),
}


@pytest.mark.parametrize("name", TREES)
def test_init_update_and_reports_decide_alike(name):
    """Also of a restored tree, of a template, and of a tree with the state under it."""
    rule = oo.Rule(".*", min_bytes=8, fraction=0.4)
    under = "inner_state" if name == "masked_outside" else ""
    tx = TREES[name](lambda inner: oo.offload(inner, rule))
    params = make_params()
    state = tx.init(params)
    expected = on_host(state)
    sizes = {path: x.nbytes for path, x in trees.leaves_with_paths(state)}
    assert 0 < len(expected) < len(sizes)
    assert 0.4 <= sum(sizes[p] for p in expected) / sum(sizes.values()) < 0.8
    state = committed(state)
    for _ in range(2):
        _, state = jax.jit(tx.update)(params, state, params)
        assert on_host(state) == expected
    template = oo.eval_shape(tx.init, params)
    restored = jax.device_get(state)
    placed = oo.place(restored, rule, under=under)
    for tree in (state, template, placed):
        assert on_host(tree) == expected
        oo.memory_report(tree, rule, under=under).check()
    with pytest.raises(oo.MemoryKindError, match=r"the largest .* for fraction 0\.4"):
        oo.memory_report(restored, rule, under=under).check()
    inside = {"step": 3, "opt_state": state, "params": params}
    below = "opt_state/" * bool(under) + under if under else "opt_state"
    oo.memory_report(inside, rule, under=below).check()


def test_with_codecs():
    """Codecs are of all leaves that the rule matches; the share of encoded bytes."""
    params = {"a": jnp.ones((64, 256)), "b": jnp.ones((128, 256))}
    rule = oo.Rule(".*/(mu|nu)/.*", codec="int8", min_bytes=8, fraction=0.5)
    state = oo.offload(optax.adam(1e-3), rule).init(params)
    assert len(encoded_parts(state)) == 8
    leaves = {trees.encoded_leaf(path) for path in on_host(state)}
    assert leaves == {"0/mu/b", "0/nu/b"}
    tx = oo.offload(optax.adam(1e-3), rule)
    _, state = jax.jit(tx.update)(params, committed(state), params)
    oo.memory_report(state, rule).check()
    plain = jax.device_get(optax.adam(1e-3).init(params))
    oo.memory_report(oo.place(plain, rule), rule).check()


def test_states_between_steps():
    """`offload_states` takes the same leaves there and back."""
    tree = {"big": jnp.ones(2**16), "small": jnp.ones(2**15)}
    there = oo.offload_states(tree, oo.Rule(".*", fraction=0.5))
    assert on_host(there) == ["big"]
    assert on_host(oo.reload_states(there, oo.Rule(".*", fraction=0.5))) == []


def test_the_table_says_which():
    """Leaves that are alike share a line, so reasons name no sizes of single leaves."""
    params = {f"layers_{i}": jnp.ones((128, 256)) for i in range(8)}
    rule = oo.Rule(".*/mu/.*", fraction=0.5)
    state = oo.offload(optax.adam(1e-3), rule).init(params)
    text = str(oo.memory_report(state, rule))
    assert re.search(
        r"0/mu/layers_\{0\.\.3\} .* the largest 512\.00 KiB of 1\.00 MiB", text
    )
    assert re.search(r"0/mu/layers_\{4\.\.7\} .* beyond the largest", text)
