"""A plan's rule file: read as written, with a comment on each rule."""

import re

from hypothesis import given
from hypothesis import strategies as st

import optax_offload as oo
from optax_offload._plan import patterns
from optax_offload._plan.rule_file import rule_file_text

MIB = 2**20

TEXT = st.text(st.characters(codec="utf-8"), min_size=1).map(re.escape)
RULES = st.builds(
    oo.Rule,
    TEXT,
    st.sampled_from(["device", "pinned_host"]),
    min_bytes=st.integers(0, 2**40),
    slice_axis=st.sampled_from(["auto", None, 0, 3]),
    optional=st.booleans(),
)


@given(st.lists(RULES, min_size=1, max_size=4), st.none() | st.integers(1, 2**40), TEXT)
def test_rule_files_are_read_as_written(tmp_path_factory, rules, window_bytes, text):
    """Whatever the rules, and whatever is said about them."""
    config = oo.OffloadConfig(rules, window_bytes)
    file = tmp_path_factory.mktemp("rules") / "rules.toml"
    summary = [" ".join(text.split())]
    file.write_text(rule_file_text(config, (), (), summary), encoding="utf-8")
    assert oo.load_config(file) == config


def test_each_rule_has_a_comment():
    """What it moves, why and what it saves."""
    leaves = [patterns.Leaf(f"0/mu/w{i}", MIB, MIB // 4, None, False) for i in (0, 1)]
    (pattern,) = patterns.leaf_patterns(leaves)
    config = oo.OffloadConfig([oo.Rule("0/nu/.*", "device"), oo.Rule(pattern.pattern)])
    text = rule_file_text(config, [pattern], (), ["for h100"])
    assert text == (
        "# Rules for optax_offload.offload, found by `optax-offload fit`:\n"
        "# for h100\n\n"
        "# Given.\n"
        "[[rules]]\n"
        "pattern = '0/nu/.*'\n"
        'memory_kind = "device"\n\n'
        "# Moves 2 leaves, the first 0/mu/w0: 512.00 KiB off each device.\n"
        "# Why: updated whole: the largest leaf comes back for that.\n"
        "[[rules]]\n"
        r"pattern = '\d+/mu/w\d+'" + "\n"
    )
