"""Texts of scheduled programs, short enough to follow by hand."""

DEVICE = "f32[1048576]{0}"
HOST = "f32[1048576]{0:S(5)}"
HEADER = "HloModule jit_step, is_scheduled=true\n"

# Two leaves, each loaded, negated and stored.
TOP_LEVEL = f"""HloModule jit_step, is_scheduled=true, \
entry_computation_layout={{({HOST}, /*index=1*/{HOST})->({HOST}, {HOST})}}, x={{}}

ENTRY %main (a: f32[1048576], b: f32[1048576]) -> (f32[1048576], f32[1048576]) {{
  %a = {HOST} parameter(0)
  %b = {HOST} parameter(1)
  %load.a = ({DEVICE}, {HOST}, u32[]) copy-start(%a), cross_program_prefetch_index=0
  %load.b = ({DEVICE}, {HOST}, u32[]) copy-start(%b)
  %loaded.a = {DEVICE} copy-done(%load.a)
  %new.a = {DEVICE} negate(%loaded.a), metadata={{op_name="jit(step)/neg"}}
  %store.a = ({HOST}, {DEVICE}, u32[]) copy-start(%new.a)
  %loaded.b = {DEVICE} copy-done(%load.b)
  %new.b = {DEVICE} negate(%loaded.b)
  %store.b = ({HOST}, {DEVICE}, u32[]) copy-start(%new.b)
  %stored.a = {HOST} copy-done(%store.a)
  %stored.b = {HOST} copy-done(%store.b)
  ROOT %out = ({HOST}, /*index=1*/{HOST}) tuple(%stored.a, %stored.b)
}}
"""

# A fusion that reads host memory itself, a store, and a copy within host memory.
WAITING = f"""{HEADER}
%fused (p: f32[1048576]) -> f32[1048576] {{
  %p = {HOST} parameter(0)
  ROOT %n = {DEVICE} negate(%p)
}}

ENTRY %main (a: f32[1048576], b: f32[1048576]) -> (f32[1048576], f32[1048576]) {{
  %a = {HOST} parameter(0)
  %b = {HOST} parameter(1)
  %twin = {HOST} copy(%b)
  %new = {DEVICE} fusion(%a), kind=kLoop, calls=%fused
  %stored = {HOST} copy(%new)
  ROOT %out = ({HOST}, {HOST}) tuple(%stored, %twin)
}}
"""

SLICE, SLICES = "f32[1,1048576]{1,0}", "f32[8,1048576]{1,0:S(5)}"

# Slices 2 to 7 of 8, one after the other: loaded, negated and stored.
LOOP = f"""{HEADER}
%body (t: (s32[], f32[8,1048576], s32[])) -> (s32[], f32[8,1048576], s32[]) {{
  %t = (s32[], {SLICES}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %buffer = {SLICES} get-tuple-element(%t), index=1
  %n = s32[] get-tuple-element(%t), index=2
  %zero = s32[] constant(0)
  %load = (({SLICES}, s32[], s32[]), {SLICE}, u32[]) dynamic-slice-start(%buffer, %i, \
%zero), dynamic_slice_sizes={{1,1048576}}
  %loaded = {SLICE} dynamic-slice-done(%load)
  %new = {SLICE} negate(%loaded)
  %store = (({SLICES}, {SLICE}, s32[], s32[]), {SLICES}, u32[]) \
dynamic-update-slice-start(%buffer, %new, %i, %zero)
  %stored = {SLICES} dynamic-update-slice-done(%store)
  ROOT %out = (s32[], {SLICES}, s32[]) tuple(%i, %stored, %n)
}}

%condition (t.1: (s32[], f32[8,1048576], s32[])) -> pred[] {{
  %t.1 = (s32[], {SLICES}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %n.1 = s32[] get-tuple-element(%t.1), index=2
  ROOT %less = pred[] compare(%i.1, %n.1), direction=LT
}}

ENTRY %main (a: f32[8,1048576]) -> f32[8,1048576] {{
  %a = {SLICES} parameter(0)
  %start = s32[] constant(2)
  %end = s32[] constant(8)
  %first = (s32[], {SLICES}, s32[]) tuple(%start, %a, %end)
  %loop = (s32[], {SLICES}, s32[]) while(%first), condition=%condition, body=%body
  ROOT %result = {SLICES} get-tuple-element(%loop), index=1
}}
"""

# A conditional of three branches: nothing, a copy within host memory, there and back.
BRANCHES = f"""{HEADER}
%wait (p: f32[1048576]) -> f32[1048576] {{
  ROOT %p = {HOST} parameter(0)
}}

%twin (q: f32[1048576]) -> f32[1048576] {{
  %q = {HOST} parameter(0)
  ROOT %c = {HOST} copy(%q)
}}

%move (r: f32[1048576]) -> f32[1048576] {{
  %r = {HOST} parameter(0)
  %loaded = {DEVICE} copy(%r)
  ROOT %stored = {HOST} copy(%loaded)
}}

ENTRY %main (i: s32[], a: f32[1048576]) -> f32[1048576] {{
  %i = s32[] parameter(0)
  %a = {HOST} parameter(1)
  ROOT %out = {HOST} conditional(%i, %a, %a, %a), branch_computations={{%wait, %twin, \
%move}}
}}
"""


def gpu_slices(position: str = "") -> str:
    """A slice loaded and one stored, in fusions, as a GPU's compiler writes them.

    Args:
      position: The attributes of both slices: empty, or that the compiler noted how
        their position follows from a loop's counter (`NOTED`).
    """
    host, part = "f32[8,128]{1,0:S(5)}", "f32[4,128]{1,0}"
    return f"""{HEADER}
%slice (p.1: f32[8,128], i.1: s32[]) -> {part} {{
  %p.1 = {host} parameter(0)
  %i.1 = s32[] parameter(1)
  %inner = {part} dynamic-slice(%p.1, %i.1, %i.1), dynamic_slice_sizes={{4,128}}\
{position}
  ROOT %copy = {part} copy(%inner)
}}

%update (p.2: f32[8,128], u.2: f32[4,128], i.2: s32[]) -> f32[8,128] {{
  %p.2 = {host} parameter(0)
  %u.2 = {part} parameter(1)
  %i.2 = s32[] parameter(2)
  ROOT %new.2 = {host} dynamic-update-slice(%p.2, %u.2, %i.2, %i.2){position}
}}

ENTRY %main (p: f32[8,128], i: s32[]) -> f32[8,128] {{
  %p = {host} parameter(0)
  %i = s32[] parameter(1)
  %s = (({host}, s32[]), {part}, u32[]) fusion-start(%p, %i), kind=kLoop, calls=%slice
  %part = {part} fusion-done(%s)
  %sine = {part} sine(%part)
  %u = (({host}, {part}, s32[]), {host}, u32[]) fusion-start(%p, %sine, %i), \
kind=kLoop, calls=%update
  ROOT %new = {host} fusion-done(%u)
}}
"""


NOTED = (
    ', backend_config={"dynamic_slice_config":'
    '{"loop_index":"0","byte_offset":"0","byte_stride":"512"}}'
)


def entry(*lines: str, header: str = HEADER) -> str:
    """A program of one computation with these instructions."""
    return "\n".join([header, "ENTRY %main () -> () {", *lines, "}"])
