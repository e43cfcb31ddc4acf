"""Random train steps against plain `jax.jit`; `tests/lib/fuzz.py` runs any number."""

import dataclasses

import pytest
from fuzz_compare import run
from fuzz_programs import (
    ADDED_FROM,
    CHOICES,
    LOOPS_FROM,
    MIXED_FROM,
    PENALTIES_FROM,
    TURNS_FROM,
    TWICE_FROM,
    Drawn,
    draw,
)

from optax_offload._emit import scan as body

QUICK, ALL, TURNS, MIXED, TWICE, PENALTIES, ADDED = 4, 24, 6, 6, 3, 6, 6


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(n, marks=[] if n < QUICK else [pytest.mark.slow])
        for n in (
            *range(ALL),
            *range(TURNS_FROM, TURNS_FROM + TURNS),
            *range(MIXED_FROM, MIXED_FROM + MIXED),
            # Of the first, noise changes as much as a step does.
            *range(TWICE_FROM + 5, TWICE_FROM + 5 + TWICE),
            # Of the first, JAX refuses some.
            *range(PENALTIES_FROM + 10, PENALTIES_FROM + 10 + PENALTIES),
            # Of the first, noise changes as much as a step does.
            *range(ADDED_FROM + 1, ADDED_FROM + 1 + ADDED),
        )
    ],
)
def test_as_plain_jit(seed):
    """One program of each seed: values, dtypes, memory kinds, donation, effects."""
    (found,) = run(draw(seed, modes=1))
    assert found.kind in ("fused", "not fused", "refused"), str(found)


# Of seeds that only a thousand had, what was left when all else was made simple.
FOUND = [
    "modes=recompute; optimizer=multi_steps; frozen=set_to_zero; devices=4; "
    "axis_types=Explicit; sharded=last",  # Buffers that replace nothing, sharded.
    # An update in a turn that takes what follows from another one in it.
    "modes=auto; optimizer=two_parts; wrapped=outside; layers=4; scan=list, scan; "
    "window=2048; donated=params; devices=4; sharded=last; at_rest=all; loop=skipped; "
    "turns=least",
    # State on the device that a cond takes from parameters at rest.
    "modes=auto; optimizer=mechanic; wrapped=outside; order=batch first; at_rest=all; "
    "loop=cond",
    # A scan with turns of its own, between those of a chain, runs once.
    "modes=host; optimizer=adamw; scan=list, scan; remat=layer; effect=debug in layer; "
    "turns=least",
    # State that is chosen between two updates, and is at rest for the second.
    "modes=auto; optimizer=adamw; selected=where, state; loop=twice",
    # A gradient whose update is there before a turn could store it.
    "modes=host; width=12; params=bfloat16; effect=debug in loss; residuals=host; "
    "turns=least; penalty=norm",
]


@pytest.mark.parametrize("text", FOUND)
def test_what_was_found(text):
    """As plain, and fused."""
    (found,) = run(Drawn.of_text(text))
    assert found.kind == "fused", str(found)


SMALL = Drawn(donated="both", effect="debug in step", clip="around")


def test_a_mistake_is_found(monkeypatch):
    """Rows in the wrong order are; without a mistake there is nothing to find."""
    (found,) = run(SMALL)
    assert found.kind == "fused", str(found)
    monkeypatch.setattr(body.ScanLoop, "_position", lambda self, number: number)
    (found,) = run(SMALL)
    assert found.kind == "FAILED"
    assert "away in" in found.detail


def test_what_is_printed_can_be_run_again():
    """Every choice is a field, and the text of what was drawn has all of it."""
    fields = {field.name for field in dataclasses.fields(Drawn)}
    others = {"seed", "modes", "optimizer", "wrapped"}
    others |= {"loop", "turns", "penalty", "added"}
    assert {*CHOICES} | others == fields
    known = LOOPS_FROM, TURNS_FROM, MIXED_FROM, TWICE_FROM, PENALTIES_FROM, ADDED_FROM
    for first in (0, *known):
        for seed in range(first, first + 100):
            assert Drawn.of_text(draw(seed).text()) == draw(seed)
