"""Reading HLO text: arrays, instructions, computations, modules."""

import pytest
from hlo_texts import BRANCHES, LOOP, TOP_LEVEL, WAITING, entry

from optax_offload.aot import _hlo
from optax_offload.aot._hlo import Array


@pytest.mark.parametrize(
    ("text", "numpy_dtype", "shape", "nbytes", "on_host"),
    [
        ("f32[8,128]{1,0:T(8,128)S(5)}", "float32", (8, 128), 4096, True),
        ("bf16[8,128]{1,0:T(8,128)(2,1)}", "bfloat16", (8, 128), 2048, False),
        ("s32[]{:S(1)}", "int32", (), 4, False),
        ("u8[<=16]{0}", "uint8", (16,), 16, False),
        ("pred[3]", "bool", (3,), 3, False),
        ("s4[8]{0:E(4)}", "int4", (8,), 4, False),
        ("c64[2]{0}", "complex64", (2,), 16, False),
        ("f8e4m3fn[2,2]{1,0}", "f8e4m3fn", (2, 2), 4, False),
    ],
)
def test_arrays(text, numpy_dtype, shape, nbytes, on_host):
    """An array's dtype, shape, bytes and memory are those that are printed."""
    module = _hlo.parse(entry(f"  ROOT %a = {text} parameter(0)"))
    (array,) = module.entry.root.arrays
    assert (array.numpy_dtype, array.dimensions) == (numpy_dtype, shape)
    assert (array.nbytes, array.on_host) == (nbytes, on_host)


def test_tokens_have_no_bytes():
    """A token is an array of nothing."""
    module = _hlo.parse(entry("  ROOT %t = token[] after-all()"))
    assert module.entry.root.nbytes == 0


def test_signature():
    """Arguments and results are read from the first line, layouts and all."""
    module = _hlo.parse(TOP_LEVEL)
    host = Array("f32", (2**20,), "0:S(5)")
    assert module.arguments == module.results == (host, host)
    assert _hlo.parse(WAITING).arguments == ()


def test_instruction():
    """Name, operation, results, operands and attributes are told apart."""
    (load,) = (i for i in _hlo.parse(TOP_LEVEL).entry if i.name == "load.a")
    assert load.opcode == "copy-start"
    assert load.operands == ("a",)
    assert [len(part) for part in load.parts] == [1, 1, 1]
    assert load.nbytes == 2 * 2**22 + 4
    assert load.starts
    assert not load.ends
    assert load.attributes == ", cross_program_prefetch_index=0"


def test_nested_results_and_operands_with_shapes():
    """A tuple in a result is one part; a shape before an operand is no operand."""
    line = (
        "  ROOT %s = ((f32[8]{0:S(5)}, s32[]), f32[4]{0}, u32[]) fusion-start("
        "f32[8]{0:S(5)} %p, s32[] %i), kind=kLoop, calls=%slice.1"
    )
    root = _hlo.parse(entry(line)).entry.root
    assert [len(part) for part in root.parts] == [2, 1, 1]
    assert root.operands == ("p", "i")
    assert root.named("calls") == "slice.1"


def test_op_name():
    """The traced operation, where the text has it; else the instruction."""
    names = {i.name: i.op_name for i in _hlo.parse(TOP_LEVEL).entry}
    assert (names["new.a"], names["new.b"]) == ("jit(step)/neg", "new.b")


def test_computations():
    """The root is the one that is marked, the users are those of each name."""
    module = _hlo.parse(LOOP)
    assert set(module.computations) == {"body", "condition", "main"}
    body = module.computations["body"]
    assert body.root.name == "out"
    assert body.parameters[0].name == "t"
    assert [i.name for i in body.users["buffer"]] == ["load", "store"]
    assert module.entry.name == "main"


def test_inside():
    """What a fusion calls is one operation; a loop's body is not."""
    assert _hlo.parse(WAITING).inside() == {"fused"}
    assert _hlo.parse(LOOP).inside() == frozenset()


def test_branches():
    """Those of a list, and those of a predicate's two."""
    assert _hlo.parse(BRANCHES).entry.root.branches == ("wait", "twin", "move")
    line = (
        "  ROOT %c = f32[] conditional(%p, %a, %a), true_computation=%yes, "
        "false_computation=%no"
    )
    assert _hlo.parse(entry(line)).entry.root.branches == ("yes", "no")


def test_attributes_of_products():
    """Contracted axes, a convolution's labels and window."""
    dot, convolution = _hlo.parse(
        entry(
            "  %d = f32[4,2] dot(%a, %b), lhs_contracting_dims={1,2}",
            "  ROOT %c = f32[4,2] convolution(%a, %b), window={size=3x1 "
            "pad=1_1x0_0}, dim_labels=0bf_0io->0bf",
        )
    ).entry
    assert dot.integers("lhs_contracting_dims") == (1, 2)
    assert dot.integers("rhs_contracting_dims") == ()
    assert dot.dim_labels is None
    assert convolution.window == {"size": "3x1", "pad": "1_1x0_0"}
    assert convolution.dim_labels == ("0bf", "0io", "0bf")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("HloModule jit_f", r"is_scheduled=true: 'HloModule jit_f'.*as_text\(\)"),
        ("HloModule f, is_scheduled=true\n", r"no ENTRY computation.*as_text\(\)"),
        (entry("  %a = f32[8] add(%b, "), r"unbalanced parentheses.*as_text\(\)"),
    ],
)
def test_what_is_no_program(text, message):
    """Another text, or a part of one, is an error that says what to pass."""
    with pytest.raises(ValueError, match=message):
        _hlo.parse(text)
