"""How often loops run, and what instructions read and write, from HLO text."""

import pytest
from hlo_texts import LOOP, WAITING, entry

from optax_offload.aot import _hlo
from optax_offload.aot._dataflow import accesses, touches_no_data, trip_count


def of(text, name):
    """A module, the computation of an instruction, and the instruction."""
    module = _hlo.parse(text)
    for computation in module.computations.values():
        if name in computation.instructions:
            return module, computation, computation.instructions[name]
    raise KeyError(name)


@pytest.mark.parametrize(
    ("old", "new", "trips"),
    [
        ("", "", 6),
        ("constant(8)", "constant(1)", 0),
        ("constant(2)", "constant(-2)", 10),
        # A pass may copy the bound before the loop.
        (
            "  %first = ",
            "  %end.1 = s32[] copy(%end)\n  %first = ",
            6,
        ),
        ("direction=LT", "direction=NE", None),
        ("body=%body", 'body=%body, x={"known_trip_count":{"n":"3"}}', 3),
        ("%start = s32[] constant(2)", "%start = s32[] parameter(1)", None),
        ("%loop = ", "%first.1 = s32[] copy(%start)\n  %loop = ", 6),
    ],
)
def test_trip_counts(old, new, trips):
    """From constants before the loop, or as the compiler noted it; else unknown."""
    assert trip_count(*of(LOOP.replace(old, new, 1), "loop")) == trips


def test_trip_count_of_a_fused_condition():
    """A GPU's compiler puts the comparison into a fusion."""
    fused = """%compare (x: s32[], y: s32[]) -> pred[] {
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %less = pred[] compare(%x, %y), direction=LT
}

%condition"""
    text = LOOP.replace("%condition (", f"{fused} (", 1).replace(
        "ROOT %less = pred[] compare(%i.1, %n.1), direction=LT",
        "ROOT %f = pred[] fusion(%i.1, %n.1), kind=kLoop, calls=%compare",
    )
    assert trip_count(*of(text, "loop")) == 6


@pytest.mark.parametrize(
    ("text", "name", "read", "written"),
    [
        (LOOP, "load", [2**22], [2**22]),
        (LOOP, "store", [2**22], [2**22]),
        (WAITING, "new", [2**22], [2**22]),
        (WAITING, "twin", [2**22], [2**22]),
    ],
)
def test_accesses(text, name, read, written):
    """A slice reads what it takes, an update in place writes what it replaces."""
    reads, writes = accesses(*of(text, name))
    assert [n for _, n in reads] == read
    assert [n for _, n in writes] == written


def test_fusions_that_update_in_place():
    """They read none of the buffer, and write as much as the update has."""
    text = """HloModule f, is_scheduled=true

%update (b: f32[8,128], u: f32[1,128], i: s32[]) -> f32[8,128] {
  %b = f32[8,128]{1,0:S(5)} parameter(0)
  %u = f32[1,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %n = f32[1,128]{1,0} negate(%u)
  ROOT %new = f32[8,128]{1,0:S(5)} dynamic-update-slice(%b, %n, %i, %i)
}

ENTRY %main (a: f32[8,128], c: f32[1,128], j: s32[]) -> f32[8,128] {
  %a = f32[8,128]{1,0:S(5)} parameter(0)
  %c = f32[1,128]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %out = f32[8,128]{1,0:S(5)} fusion(%a, %c, %j), kind=kLoop, calls=%update
}
"""
    reads, writes = accesses(*of(text, "out"))
    assert {a.dimensions: n for a, n in reads} == {(8, 128): 0, (1, 128): 512, (): 4}
    assert [(a.on_host, n) for a, n in writes] == [(True, 512)]


@pytest.mark.parametrize(
    ("line", "no_data"),
    [
        ("f32[8] bitcast(%a)", True),
        ('f32[8] custom-call(), custom_call_target="AllocateBuffer"', True),
        ('f32[8] custom-call(%a), custom_call_target="cublas$gemm"', False),
        ("f32[8] copy(%a)", False),
    ],
)
def test_what_touches_no_data(line, no_data):
    """Names for values, and reserved buffers."""
    root = _hlo.parse(entry(f"  ROOT %r = {line}")).entry.root
    assert touches_no_data(root) == no_data
