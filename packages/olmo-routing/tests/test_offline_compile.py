"""Every kernel as it is launched on CUDA, compiled here for GPUs that need not be here.

The launchers run on CPU tensors and each launch only compiles. What comes out must spill no
register and fit into the shared memory.
"""

import pytest
import torch
from compiled_kernels import SHARED_BYTES, assert_fits, compiling_for, resources

T = 64


def _gate(E: int, *, sigmoid: bool, everything: bool, given: bool = False) -> None:
    from olmo_routing._triton.gate import gate
    from olmo_routing._triton.gate_backward import gate_backward

    K = min(8, E // 2) if E < 512 else 16
    groups = 8 if everything and E >= 64 else 1
    logits, weights = torch.empty(T, E), torch.empty(T, K)
    ids = torch.empty(T, K, dtype=torch.int64)
    gate(
        logits,
        torch.empty(E) if everything else None,
        torch.empty(T, dtype=torch.bool) if everything else None,
        ids if given else None,
        top_k=K,
        sigmoid=sigmoid,
        renormalize=True,
        route_scale=1.0,
        num_groups=groups,
        topk_groups=max(1, groups // 2),
    )
    gate_backward(
        logits,
        ids,
        weights,
        weights,
        logits,
        sigmoid=sigmoid,
        renormalize=True,
        route_scale=1.0,
    )


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("E", [8, 64, 128, 256, 512])
def test_the_gate_spills_nothing(E: int, capability: int) -> None:
    for everything in (False, True):
        with compiling_for(capability) as compiled:
            _gate(E, sigmoid=everything, everything=everything)
        assert len(compiled) == 2, "the gate and its backward"
        for kernel in compiled:
            assert_fits(kernel)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("E", [8, 64, 128, 256, 512])
def test_the_plan_spills_nothing(E: int, capability: int) -> None:
    from olmo_routing._triton.plan import plan_rows, plan_tiles

    with compiling_for(capability) as compiled:
        plan_rows(torch.zeros(T, 4, dtype=torch.int64), E, 128)
        plan_tiles(torch.zeros(E, dtype=torch.int32), 4 * T, 128)
    count, place, tiles = compiled
    assert_fits(place)
    assert_fits(tiles)
    # The call of a failed assertion has a stack of its own.
    assert "assertfail" in count.asm["ptx"], "an id out of range must be an error"
    assert resources(count)["SHARED"] <= SHARED_BYTES[80]


def test_given_ids_out_of_range_are_an_error() -> None:
    with compiling_for(90) as compiled:
        _gate(64, sigmoid=False, everything=False, given=True)
        _gate(64, sigmoid=False, everything=False)
    given, _, _, selected, *_ = compiled
    assert "assertfail" in given.asm["ptx"]
    assert "assertfail" not in selected.asm["ptx"]
