"""The kernels of the weight gradient on FP8 units, compiled for GPUs that need not be here."""

import re

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


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_quantising_along_tokens(capability):
    from olmo_mxfp8._formats import FORMATS
    from olmo_mxfp8._triton.quantize_tokens import quantize_tokens

    codes = packed(R, K, dtype=torch.uint8), packed(R, K // 32, dtype=torch.uint8)
    with compiling_for(capability) as compiled:
        for element in FORMATS.values():
            for x in (packed(R, K), packed(R, K, dtype=torch.float32)):
                quantize_tokens(x, None, None, offsets(), element, rceil=True)
            for source in FORMATS.values():
                quantize_tokens(*codes, source, offsets(), element, rceil=True)
    listings, kernels = compiled[::2], compiled[1::2]
    assert len(kernels) == 2 * (2 + 2)
    assert all("assertfail" in each.asm["ptx"] for each in listings)
    for kernel in kernels:
        assert_fits(kernel, capability)


@OUT_DTYPES
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_the_token_product_multiplies_codes_on_hopper(out_dtype, formats):
    from olmo_mxfp8._triton.quantize_tokens import num_places
    from olmo_mxfp8._triton.token_product import token_product

    places = num_places(R, E)
    with compiling_for(90) as compiled:
        token_product(
            packed(N, 128 * places, dtype=formats[0]),
            packed(places, N, dtype=torch.float32),
            packed(K, 128 * places, dtype=formats[1]),
            packed(places, K, dtype=torch.float32),
            offsets(),
            R,
            out_dtype,
        )
    (kernel,) = compiled
    names = ".".join("e4m3" if each == E4M3 else "e5m2" for each in formats)
    assert re.search(rf"wgmma\.mma_async\S*{re.escape(names)}", kernel.asm["ptx"])
    assert_fits(kernel, 90)
    assert 2 * kernel.metadata.shared <= 227 * 1024, "a multiprocessor is to hold two programs"
