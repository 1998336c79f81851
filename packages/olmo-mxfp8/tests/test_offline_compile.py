"""Every kernel as it is launched on CUDA, compiled here for GPUs that need not be here.

The launchers run on CPU tensors with the tilings for CUDA tensors, and each launch only compiles.
What comes out must use the matrix units of its architecture and spill no register.
"""

import itertools
import re
from typing import Any

import pytest
import torch
from offline_operands import (
    E4M3,
    E5M2,
    OUT_DTYPES,
    E,
    K,
    N,
    R,
    assert_fits,
    compiling_for,
    offsets,
    packed,
)
from torch import Tensor


def _product(
    kind: str,
    out_dtype: torch.dtype,
    *,
    K: int = K,
    N: int = N,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
) -> None:
    from olmo_mxfp8._triton.row_product import row_product

    if dtypes is None:
        dtypes = (torch.bfloat16,) * 2 if kind == "plain" else (torch.float8_e4m3fn,) * 2
    scales: dict[str, tuple[Tensor, Tensor] | tuple[None, None]] = {
        "plain": (None, None),
        "native": (
            packed(R, K // 32, dtype=torch.uint8),
            packed(E, N, K // 32, dtype=torch.uint8),
        ),
    }
    a_scales, b_scales = scales[kind]
    row_product(
        packed(R, K, dtype=dtypes[0]),
        packed(E, N, K, dtype=dtypes[1]),
        offsets(),
        out_dtype,
        kind=kind,
        a_scales=a_scales,
        b_scales=b_scales,
    )


def _compile_product(capability: int, kind: str, out_dtype: torch.dtype, **options: Any) -> Any:
    with compiling_for(capability) as compiled:
        _product(kind, out_dtype, **options)
    listing, product = compiled
    assert "assertfail" in listing.asm["ptx"], "offsets out of order must be an error"
    return product


UNITS = {
    80: r"mma\.sync\S*bf16",
    90: r"wgmma\.mma_async\S*bf16",
    100: r"tcgen05\.mma\S*f16",
    120: r"mma\.sync\S*bf16",
}
SCALED_UNITS = {100: r"tcgen05\.mma\S*mxf8f6f4\.block_scale", 120: r"mma\.sync\S*block_scale"}
ELEMENTS = {E4M3: "e4m3", E5M2: "e5m2"}


@OUT_DTYPES
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_the_plain_product(capability: int, out_dtype: torch.dtype) -> None:
    for sizes in ({}, {"K": 544, "N": 200}):  # and sizes that no tile divides
        kernel = _compile_product(capability, "plain", out_dtype, **sizes)
        assert re.search(UNITS[capability], kernel.asm["ptx"])
        assert_fits(kernel, capability)


PAIRS = list(itertools.product(ELEMENTS, ELEMENTS))
SCALED_CASES = [
    *((PAIRS[0], out_dtype) for out_dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *((pair, torch.bfloat16) for pair in PAIRS[1:]),
    (PAIRS[-1], torch.float32),
]


@pytest.mark.parametrize(("dtypes", "out_dtype"), SCALED_CASES, ids=str)
def test_the_coarse_product_multiplies_codes_on_hopper(
    dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype
) -> None:
    from olmo_mxfp8._triton.coarse_product import coarse_product

    with compiling_for(90) as compiled:
        coarse_product(
            packed(R, K, dtype=dtypes[0]),
            packed(R, K // 32, dtype=torch.uint8),
            packed(E, N, K, dtype=dtypes[1]),
            packed(E, N, K // 32, dtype=torch.uint8),
            offsets(),
            out_dtype,
        )
    kernel = compiled[-1]
    names = r"\.".join(ELEMENTS[each] for each in dtypes)
    assert re.search(rf"wgmma\.mma_async\S*{names}", kernel.asm["ptx"])
    assert_fits(kernel, 90)


@pytest.mark.parametrize(("dtypes", "out_dtype"), SCALED_CASES, ids=str)
@pytest.mark.parametrize("capability", [100, 120])
def test_the_native_product_gives_scales_to_blackwell(
    capability: int, dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype
) -> None:
    odd = {"K": 544, "N": 200}
    for sizes in ({}, odd) if dtypes == PAIRS[0] else ({},):
        kernel = _compile_product(capability, "native", out_dtype, dtypes=dtypes, **sizes)
        assert re.search(SCALED_UNITS[capability], kernel.asm["ptx"])
        if capability == 120:  # on sm_100 the formats are in a descriptor
            names = r"\.".join(ELEMENTS[each] for each in dtypes)
            assert re.search(rf"mma\.sync\S*f32\.{names}\.f32\.ue8m0", kernel.asm["ptx"])
        assert_fits(kernel, capability)


@OUT_DTYPES
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_the_outer_product(capability: int, out_dtype: torch.dtype) -> None:
    from olmo_mxfp8._triton.outer_product import outer_product

    with compiling_for(capability) as compiled:
        outer_product(packed(R, N), packed(R, K), offsets(), out_dtype)
    (kernel,) = compiled
    assert re.search(UNITS[capability], kernel.asm["ptx"])
    assert_fits(kernel, capability)


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_swiglu(capability: int) -> None:
    from olmo_mxfp8._formats import FORMATS
    from olmo_mxfp8._triton import swiglu

    hidden, d_act = packed(R, 2 * N), packed(R, N)
    with compiling_for(capability) as compiled:
        for granularity in (32, 128):
            for weights in (None, torch.zeros(R)):
                options = {"rceil": True, "granularity": granularity}
                swiglu.swiglu_quantize(hidden, weights, FORMATS["e4m3"], **options)
                swiglu.swiglu_quantize_backward(d_act, hidden, weights, FORMATS["e4m3"], **options)
    assert len(compiled) == 8
    for kernel in compiled:
        assert_fits(kernel, capability)


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_quantise_and_dequantise(capability: int) -> None:
    from olmo_mxfp8._formats import FORMATS
    from olmo_mxfp8._triton import dequantize, dequantize_rows, quantize

    with compiling_for(capability) as compiled:
        for element in FORMATS.values():
            x = packed(256, 512)
            for dim in (0, 1):
                for granularity in (32, 128):
                    quantize.quantize(x, dim, element, rceil=True, granularity=granularity)
                    if dim == 1:
                        options = {"granularity": granularity, "weights_R": torch.zeros(256)}
                        quantize.quantize(x, dim, element, rceil=True, **options)
                quantize.quantize_tiles(x, dim, element, rceil=True)
                scales = packed(256 // 32 ** (1 - dim), 512 // 32**dim, dtype=torch.uint8)
                codes = packed(256, 512, dtype=torch.uint8)
                dequantize.dequantize(codes, scales, dim, element, torch.bfloat16)
            quantize.quantize_both(x, element, rceil=True)
            scales = packed(256, 512 // 32, dtype=torch.uint8)
            rows = torch.zeros(R, dtype=torch.int32)
            dequantize_rows.dequantize_rows(codes, scales, rows, element, torch.bfloat16)
            assert "assertfail" in compiled[-1].asm["ptx"], "a row out of range must be an error"
    assert len(compiled) == 2 * (2 * 4 + 2 + 2)
    for kernel in compiled:
        assert_fits(kernel, capability)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_weights_with_their_transposes(capability: int, tiles: bool) -> None:
    """Read once, and both results written a line at a time."""
    from olmo_mxfp8._formats import FORMATS
    from olmo_mxfp8._triton.quantize_transpose import quantize_with_transpose

    with compiling_for(capability) as compiled:
        for element in FORMATS.values():
            for dtype in (torch.float32, torch.bfloat16):
                w = packed(E, 256, 512, dtype=dtype)
                quantize_with_transpose(w, element, rceil=True, tiles=tiles)
    assert len(compiled) == 4
    for kernel in compiled:
        assert_fits(kernel, capability)
        ptx = kernel.asm["ptx"]
        assert set(re.findall(r"ld\.global\S*", ptx)) == {"ld.global.v4.b32"}
        # Bytes one by one are scales.
        assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32", "st.global.b8"}


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_quantise_pairs_of_bfloat16(capability: int) -> None:
    from olmo_mxfp8._formats import FORMATS
    from olmo_mxfp8._triton import quantize_pairs

    x, codes = packed(256, 512), packed(256, 512, dtype=torch.uint8)
    row_scales, column_scales = (packed(*s, dtype=torch.uint8) for s in ((256, 16), (8, 512)))
    with compiling_for(capability) as compiled:
        for element in FORMATS.values():
            for granularity in (32, 128):
                quantize_pairs.quantize_columns(
                    x, codes, column_scales, element, rceil=True, granularity=granularity
                )
            results = (codes, row_scales, codes, column_scales)
            quantize_pairs.quantize_both(x, *results, element, rceil=True)
    assert len(compiled) == 2 * (2 + 1)
    for kernel in compiled:
        assert_fits(kernel, capability)
