"""The check of programs that the placement tests have beside `aot.transfers`."""

import types

import program
import pytest
from hlo_texts import entry

HOST, DEVICE = "f32[8,128]{1,0:S(5)}", "f32[8,128]{1,0}"
START = (
    f"  %p = {HOST} parameter(0)",
    f"  %load = ({DEVICE}, {HOST}, u32[]) copy-start(%p)",
    f"  %loaded = {DEVICE} copy-done(%load)",
)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((f"  %s = {DEVICE} sine(%loaded)", f"  ROOT %r = {HOST} copy(%s)"), []),
        (
            (
                f"  %c = {DEVICE} copy(%loaded)",
                f"  %s = {DEVICE} sine(%c)",
                f"  ROOT %r = {HOST} copy(%s)",
            ),
            ["c"],
        ),
        (
            (
                f"  %s = {DEVICE} sine(%loaded)",
                f"  %c = {DEVICE} copy(%s)",
                f"  ROOT %r = {HOST} copy(%c)",
            ),
            ["c"],
        ),
        (
            (
                f"  %s = {DEVICE} sine(%loaded)",
                "  %c = f32[8,128]{0,1} copy(%s)",
                f"  ROOT %r = {HOST} copy(%c)",
            ),
            [],
        ),
    ],
    ids=["none", "of what was loaded", "for a store", "to another layout"],
)
def test_transfers_that_are_none_are_seen(lines, found):
    """A copy within device memory, of what was loaded or for a store."""
    text = entry(*START, *lines)
    compiled = types.SimpleNamespace(as_text=lambda: text)
    assert program.pretended(compiled) == found
