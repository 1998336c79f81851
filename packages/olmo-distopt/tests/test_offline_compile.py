"""Every kernel as it is launched on CUDA, compiled here for GPUs that need not be here.

The launchers run on CPU tensors and each launch only compiles. What comes out must spill no
register.
"""

import re

import pytest
import torch
from compiled_kernels import SHARED_BYTES, assert_fits, compiling_for

NUMEL = 4096


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_adamw_spills_nothing_and_moves_16_bytes_at_a_time(capability, guarded, moment_dtype):
    """Lines that start and end at multiples of 16; of the others one launch and no more is said."""
    from olmo_distopt._triton.adamw import Line, adamw, tabulate

    number = torch.zeros(())

    def line(numel):
        moments = [torch.zeros(numel, dtype=moment_dtype) for _ in range(2)]
        copy = torch.zeros(numel, dtype=torch.bfloat16)
        return Line(torch.zeros(numel), torch.zeros(numel), *moments, copy)

    with compiling_for(capability) as compiled:
        adamw(
            tabulate([line(NUMEL), line(NUMEL + 1), line(16), line(7)]),
            *(number, number, number if guarded else None),
            torch.tensor(False) if guarded else None,
            betas=(0.9, 0.95),
            eps=1e-8,
            keep=0.9,
        )
    aligned, other = compiled
    for kernel in compiled:
        assert_fits(kernel)
    wide = re.findall(r"(?:ld|st)\.global\.v4\.b32", aligned.asm["ptx"])
    # Blocks of 1024 elements by 128 threads: twice 4 elements each of main, gradient and moments.
    assert len(wide) == (2 * (4 + 3) if moment_dtype == torch.float32 else 2 * (2 + 1))
    assert aligned.metadata.shared == 0, "a line goes through shared memory"
    assert ".v4.b32" not in other.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_accumulate_spills_nothing_and_moves_16_bytes_at_a_time(capability, dtype):
    from olmo_distopt._triton.accumulate import accumulate

    with compiling_for(capability) as compiled:
        accumulate(torch.zeros(NUMEL), torch.zeros(NUMEL, dtype=dtype))
    (kernel,) = compiled
    assert_fits(kernel)
    assert kernel.metadata.shared == 0, "a line goes through shared memory"
    for width in ("ld.global.v4.b32", "st.global.v4.b32"):
        assert width in kernel.asm["ptx"], f"no {width}"


def test_newton_schulz_runs_on_hoppers_units_and_spills_nothing():
    from olmo_distopt._triton.newton_schulz import apply, symmetric_product

    x = torch.zeros(2, 512, 384, dtype=torch.bfloat16)
    gram = torch.zeros(2, 512, 512, dtype=torch.bfloat16)
    with compiling_for(90) as compiled:
        symmetric_product(x)
        symmetric_product(gram, gram, alpha=2.0, beta=3.0)
        apply(gram, x, beta=2.0)
    assert len(compiled) == 3
    for kernel in compiled:
        assert_fits(kernel, SHARED_BYTES[90])
        assert re.search(r"wgmma\.mma_async\S*bf16", kernel.asm["ptx"])
