"""Counting matrix products, by axes that are short enough to count by hand.

Custom calls are as XLA prints them for an H100 (JAX 0.12.0.1), shortened.
"""

import jax
import jax.numpy as jnp
import pytest

from optax_offload import aot
from optax_offload.aot import _hlo
from optax_offload.aot._products import Flops, _Axis, _positions, flops
from optax_offload.aot._timeline import Model


def axis(inputs, kernel, outputs, **changes):
    """An axis of a convolution; without changes, of stride 1 and no padding."""
    plain = {"stride": 1, "padding": 0, "left_dilation": 1, "kernel_dilation": 1}
    return _Axis(inputs, kernel, outputs, **(plain | changes))


@pytest.mark.parametrize(
    ("found", "positions"),
    [
        (axis(5, 3, 3), 9),
        # Of padding on both sides the first and the last output miss one input.
        (axis(5, 3, 5, padding=1), 13),
        # On one side: outputs that begin there, not after the end.
        (axis(5, 3, 3, padding=2), 1 + 2 + 3),
        (axis(5, 1, 3, stride=2), 3),
        (axis(5, 2, 3, stride=2), 2 + 2 + 1),
        # A kernel whose positions are two apart: at 0 and 2, at 1 and 3, at 2 and 4.
        (axis(5, 2, 3, kernel_dilation=2), 6),
        (axis(5, 2, 5, kernel_dilation=3), 5 + 2),
        # Inputs that are two apart: every other position falls between them.
        (axis(3, 1, 5, left_dilation=2), 3),
        (axis(3, 2, 4, left_dilation=2), 4),
    ],
)
def test_positions_that_meet_an_input(found, positions):
    """Those of the window that fall into padding, or between inputs, are free."""
    assert _positions(found) == positions


def test_products_of_both_widths_take_their_time_one_after_the_other():
    """Each at its own rate; or the bytes, if these take longer."""
    model = Model(
        memory_bytes_per_second=10.0, flops_per_second=2.0, narrow_flops_per_second=4.0
    )
    assert model.compute_seconds(0, Flops(wide=6, narrow=8)) == 3 + 2
    assert model.compute_seconds(70, Flops(wide=6, narrow=8)) == 7


def program(*lines):
    """A program of these lines; the last one is what is counted."""
    header = "HloModule jit_step, is_scheduled=true\n\nENTRY %main () -> f32[] {"
    return _hlo.parse("\n".join((header, *lines, "}", "")))


def count(*lines):
    """What the last line of a program multiplies."""
    module = program(*lines)
    return flops(module, module.entry, module.entry.root)


def gemm(target, left, right, result, contracted=("1", "0"), batch="[]"):
    """A call of cuBLAS, with the axes that its configuration names."""
    return (
        f"  %a.1 = {left} parameter(0)",
        f"  %b.1 = {right} parameter(1)",
        f"  ROOT %custom-call.1 = ({result}, s8[4194304]{{0}}) "
        f'custom-call(%a.1, %b.1), custom_call_target="{target}", '
        'backend_config={"operation_queue_id":"0",'
        '"gemm_backend_config":{"selected_algorithm":"0","alpha_real":1,"beta":0,'
        f'"dot_dimension_numbers":{{"lhs_contracting_dimensions":["{contracted[0]}"],'
        f'"rhs_contracting_dimensions":["{contracted[1]}"],"lhs_batch_dimensions":{batch},'
        f'"rhs_batch_dimensions":{batch}}},"epilogue":"DEFAULT","scale_mode":0}},'
        '"force_earliest_schedule":false}',
    )


@pytest.mark.parametrize(
    "target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"]
)
def test_products_of_cublas(target):
    """By the axes that the call contracts, whichever of the factors are transposed."""
    narrow = count(
        *gemm(target, "bf16[512,1024]{1,0}", "bf16[1024,256]{1,0}", "bf16[512,256]")
    )
    assert narrow == Flops(narrow=2 * 512 * 1024 * 256)
    wide = count(
        *gemm(
            target,
            "f32[1024,512]{1,0}",
            "f32[256,1024]{1,0}",
            "f32[512,256]{1,0}",
            contracted=("0", "1"),
        )
    )
    assert wide == Flops(wide=2 * 512 * 1024 * 256)


def test_batched_products_of_cublas():
    """A product for each position of the batch, and no more."""
    found = count(
        *gemm(
            "__cublas$lt$matmul",
            "bf16[8,512,1024]{2,1,0}",
            "bf16[8,1024,256]{2,1,0}",
            "bf16[8,512,256]{2,1,0}",
            contracted=("2", "1"),
            batch='["0"]',
        )
    )
    assert found == Flops(narrow=8 * 2 * 512 * 1024 * 256)


IMAGES, KERNEL, FEATURES = "bf16[8,9,9,64]", "bf16[128,3,3,64]", "bf16[8,4,4,128]"


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("__cudnn$convForward", (IMAGES, KERNEL), FEATURES),
        ("__cudnn$convBiasActivationForward", (IMAGES, KERNEL), FEATURES),
        ("__cudnn$convBackwardFilter", (IMAGES, FEATURES), KERNEL),
        ("__cudnn$convBackwardInput", (FEATURES, KERNEL), IMAGES),
    ],
)
def test_convolutions_of_cudnn(target, operands, result):
    """A gradient multiplies as much as its convolution, whose labels the call has."""
    a, b = operands
    found = count(
        f"  %a = {a}{{3,2,1,0}} parameter(0)",
        f"  %b = {b}{{3,2,1,0}} parameter(1)",
        f"  ROOT %cudnn-conv.2 = ({result}{{3,2,1,0}}, u8[0]{{0}}) "
        "custom-call(%a, %b), window={size=3x3 stride=2x2}, "
        "dim_labels=b01f_o01i->b01f, "
        f'custom_call_target="{target}", backend_config={{"operation_queue_id":"0",'
        '"cudnn_conv_backend_config":{"activation_mode":"kNone"}}',
    )
    assert found == Flops(narrow=2 * 8 * (4 * 4) * 128 * (3 * 3) * 64)


def attention(target, products, mask, results=1):
    """A call of cuDNN's attention: 4 times 8 heads, 512 by 256 positions."""
    result, heads = "bf16[4,8,512,64]{3,1,2,0}", {"q": (512, 64), "k": (256, 64)}
    heads["v"] = (256, 32)
    numbers = ", ".join(
        f'"{p}_dot_dimension_numbers": {{"lhs_contracting_dimensions": ["3"]}}'
        for p in products
    )
    return (
        *(
            f"  %{name} = bf16[4,{length},8,{width}]{{3,2,1,0}} parameter({n})"
            for n, (name, (length, width)) in enumerate(heads.items())
        ),
        f"  ROOT %dot_product_attention = ({', '.join([result] * results)}, "
        f'u8[0]{{0}}) custom-call(%q, %k, %v), custom_call_target="{target}", '
        "api_version=API_VERSION_STATUS_RETURNING, backend_config="
        '{"operation_queue_id": "0", "cudnn_fmha_backend_config": {"fmha_scale": '
        '0.125, "intermediate_tensor_shape": {"element_type": "BF16", "dimensions": '
        f'["4", "8", "512", "256"], "tuple_shapes": []}}, "mask_type": "{mask}", '
        f'{numbers}, "dropout_rate": 0.0}}}}',
    )


def test_attention_of_cudnn():
    """Two products forward, of a causal mask half; backward all five, scores again."""
    forward = "__cudnn$fmhaSoftmax", ("bmm1", "bmm2")
    backward = (
        "__cudnn$fmhaScaleBiasSoftmaxBackward",
        (
            "bmm1_grad_gemm1",
            "bmm1_grad_gemm2",
            "bmm2_grad_gemm1",
            "bmm2_grad_gemm2",
        ),
    )
    scores = 4 * 8 * 512 * 256
    found = count(*attention(*forward, "NO_MASK"))
    assert found == Flops(narrow=2 * scores * (64 + 32))
    found = count(*attention(*forward, "PADDING_CAUSAL"))
    assert found == Flops(narrow=scores * (64 + 32))
    found = count(*attention(*backward, "NO_MASK", results=3))
    assert found == Flops(narrow=2 * scores * (3 * 64 + 2 * 32))


@pytest.mark.parametrize(
    "call",
    [
        'custom_call_target="__cublas$triangularSolve", backend_config={"a":1}',
        'custom_call_target="__cublas$lt$groupedMatmul", backend_config=opaque',
        'custom_call_target="mosaic_gpu_v2"',
    ],
)
def test_calls_that_do_not_say_what_they_multiply(call):
    """They count nothing, whatever their configuration is."""
    assert count(
        "  %a = f32[8,8]{1,0} parameter(0)",
        f"  ROOT %c = f32[8,8]{{1,0}} custom-call(%a, %a), {call}",
    ) == Flops(0, 0)


@pytest.mark.parametrize("kind", ["__triton_gemm", "__triton_nested_gemm_fusion"])
def test_products_in_fusions_of_triton(kind):
    """They are counted in what is fused, here with the sum in eight parts."""
    module = _hlo.parse(f"""HloModule jit_dot, is_scheduled=true

%gemm_computation (p.0: bf16[8,512,128], p.1: bf16[8,128,256]) -> f32[8,512,256] {{
  %p.0 = bf16[512,8,128]{{2,1,0}} parameter(0)
  %p.1 = bf16[8,128,256]{{2,1,0}} parameter(1)
  ROOT %dot.1 = f32[8,512,256]{{2,1,0}} dot(%p.0, %p.1), lhs_batch_dims={{1}}, \
lhs_contracting_dims={{2}}, rhs_batch_dims={{0}}, rhs_contracting_dims={{1}}
}}

ENTRY %main (a: bf16[512,8,128], b: bf16[8,128,256]) -> f32[8,512,256] {{
  %a = bf16[512,8,128]{{2,1,0}} parameter(0)
  %b = bf16[8,128,256]{{2,1,0}} parameter(1)
  ROOT %gemm_fusion_dot = f32[8,512,256]{{2,1,0}} fusion(%a, %b), kind=kCustom, \
calls=%gemm_computation, backend_config={{"fusion_backend_config":{{"kind":"{kind}"}}}}
}}
""")
    found = flops(module, module.entry, module.entry.root)
    assert found == Flops(narrow=2 * 512 * (8 * 128) * 256)


@pytest.mark.parametrize("triton", [False, True], ids=["cublas", "triton"])
@pytest.mark.aot
def test_compiled_products_are_counted(triton):
    """Those of a batch, and the gradients of a convolution, whoever multiplies."""
    options = {"xla_gpu_enable_triton_gemm": triton}
    a = jax.ShapeDtypeStruct((8, 512, 1024), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((8, 1024, 256), jnp.bfloat16)
    images = jax.ShapeDtypeStruct((8, 9, 9, 64), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((3, 3, 64, 128), jnp.bfloat16)

    def convolved(x, k):
        axes = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, k, (2, 2), "VALID", dimension_numbers=axes)
        return x.astype(jnp.float32).sum()

    def step(a, b, x, k):
        return a @ b, jax.value_and_grad(convolved, argnums=(0, 1))(x, k)

    compiled = aot.compile(
        step, a, b, images, kernel, target=aot.Target("h100"), compiler_options=options
    )
    text = compiled.as_text() or ""
    assert ('"__cublas$' in text) != triton
    assert ("gemm_fusion" in text) == triton
    module = _hlo.parse(text)
    found = [flops(module, module.entry, i) for i in module.entry]
    convolution = 2 * 8 * (4 * 4) * 128 * (3 * 3) * 64
    expected = 8 * 2 * 512 * 1024 * 256 + 3 * convolution
    assert Flops(*map(sum, zip(*found, strict=True))) == Flops(narrow=expected)
