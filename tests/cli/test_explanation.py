"""Which leaf goes where, and which rule decides nothing."""

import json

import optax_offload as oo
from optax_offload.cli.explanation import explanation_of

MIB = 2**20
LEAVES = [("mu/w", MIB), ("mu/b", 4), ("nu/w", 2 * MIB), ("key", None)]


def test_leaves_and_their_bytes():
    """With what decided; nothing of what cannot move."""
    found = explanation_of([oo.Rule("mu/.*")], LEAVES)
    kinds = {x.path: x.memory_kind for x in found.leaves}
    assert kinds.pop("mu/w") == "pinned_host"
    assert set(kinds.values()) == {"device"}
    assert found.bytes_in("pinned_host") == MIB
    assert found.bytes_in("device") == 2 * MIB + 4
    assert found.idle_rules == ()
    assert json.loads(json.dumps(found.as_dict()))["leaves"][0] == {
        "path": "mu/w",
        "bytes": MIB,
        "memory_kind": "pinned_host",
        "why": "rule 0 'mu/.*'",
        "codec": "",
    }


def test_rules_that_decide_nothing():
    """They match nothing, or what others have decided already: the same rule, twice."""
    rules = [
        oo.Rule("mu/.*"),
        oo.Rule("mu/w"),
        oo.Rule("mu/.*"),
        oo.Rule("x", optional=True),
    ]
    found = explanation_of(rules, LEAVES)
    assert found.idle_rules == (
        (1, "mu/w", False),
        (2, "mu/.*", False),
        (3, "x", True),
    )


def test_a_share_of_what_a_rule_matches():
    """Each leaf says whether it is of the largest ones or beyond."""
    found = explanation_of([oo.Rule(".*", fraction=0.5)], LEAVES)
    why = {x.path: (x.memory_kind, x.why) for x in found.leaves}
    share = "the largest 2.00 MiB of 3.00 MiB, for fraction 0.5 (rule 0 '.*')"
    assert why["nu/w"] == ("pinned_host", share)
    assert why["mu/w"] == ("device", f"beyond {share}")
    assert why["mu/b"] == ("device", "under 64.00 KiB (rule 0 '.*')")
