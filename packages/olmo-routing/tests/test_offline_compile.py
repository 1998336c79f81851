"""Every kernel as it is launched on CUDA, compiled here for GPUs that need not be here.

The launchers run on CPU tensors and each launch only compiles. What comes out must spill no
register and fit into the shared memory.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

# What one program may have on sm_80, and on the smaller sm_86 and sm_89.
SHARED_BYTES = 99 * 1024
T = 64


class _Device:
    """What compilation asks of the active driver; an architecture is a device with its number."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", self.capability, 32)


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Any]]:
    """Within, a launch on CPU tensors compiles and nothing more; yields what was compiled."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, **options: Any) -> Any:
        compiled.append(run(self, *args, **options | {"warmup": True}))
        return compiled[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", _Device(capability))
        patch.setattr(JITFunction, "run", compile_only)
        yield compiled


def resources(kernel: Any) -> dict[str, int]:
    """Registers a thread, bytes of its stack, and bytes of shared memory a program."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(REG|STACK|LOCAL):(\d+)", text)
    assert [name for name, _ in found] == ["REG", "STACK", "LOCAL"], text
    return {name: int(value) for name, value in found} | {"SHARED": kernel.metadata.shared}


def assert_fits(kernel: Any, stack: int = 0) -> None:
    used = resources(kernel)
    name = kernel.metadata.name
    assert max(used["STACK"], used["LOCAL"]) <= stack, f"{name} spills registers: {used}"
    assert used["SHARED"] <= SHARED_BYTES, f"{name}: {used}"


def _gate(E: int, *, sigmoid: bool, everything: bool, given: bool = False) -> None:
    from olmo_routing._triton.gate import gate, gate_backward

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
    assert resources(count)["SHARED"] <= SHARED_BYTES


def test_given_ids_out_of_range_are_an_error() -> None:
    with compiling_for(90) as compiled:
        _gate(64, sigmoid=False, everything=False, given=True)
        _gate(64, sigmoid=False, everything=False)
    given, _, _, selected, *_ = compiled
    assert "assertfail" in given.asm["ptx"]
    assert "assertfail" not in selected.asm["ptx"]
