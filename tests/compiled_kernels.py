"""Compile kernels as they are launched on CUDA, for GPUs that need not be here.

Launchers run on CPU tensors and each launch only compiles:

    with compiling_for(90) as compiled:
        launcher(x, w)
    for kernel in compiled:
        assert_fits(kernel)

A test module that imports this one is skipped without Triton and in a process that interprets.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

SHARED_BYTES = {80: 99 * 1024, 90: 232448, 100: 232448, 120: 99 * 1024}
"""What one program may have; 99 KiB is the least among the devices that sm_80 code runs on."""


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
    text = _dump(kernel, "--dump-resource-usage")
    found = re.findall(r"(REG|STACK|LOCAL):(\d+)", text)
    assert [name for name, _ in found] == ["REG", "STACK", "LOCAL"], text
    return {name: int(value) for name, value in found} | {"SHARED": kernel.metadata.shared}


def assert_fits(kernel: Any, shared_bytes: int = SHARED_BYTES[80]) -> None:
    """No register is spilled, stack being where it would go, and the shared memory is there.

    For sm_120 the compiler of Triton 3.6 writes zeros to 8 bytes of stack beside some barriers, and
    reads them nowhere. That is no spill: what was spilled is read again.
    """
    used, name = resources(kernel), kernel.metadata.name
    spills = used["STACK"] + used["LOCAL"] > 0 and "LDL" in _dump(kernel, "--dump-sass")
    assert not spills, f"{name} spills registers: {used}"
    assert used["SHARED"] <= shared_bytes, f"{name} takes too much shared memory: {used}"


def _dump(kernel: Any, what: str) -> str:
    """What Triton's own `cuobjdump` says of a compiled kernel."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [cuobjdump, what, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
        return done.stdout
