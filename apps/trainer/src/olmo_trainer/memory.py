"""What a rank's memory holds, by kind, in bytes.

    weights     parameters as the model computes with them
    gradients   FP32 gradients
    optimizer   FP32 main weights and moments
    other       what the peak has beside them: activations, communication buffers, caches, workspace
    peak        most that was allocated at a time since the last look
    reserved    what torch's allocator has taken from the device

On a CPU there is no allocator to ask: the peak is the process's greatest resident size so far,
libraries and data included, and `reserved` the same.
"""

import sys

import torch
from olmo_distopt import FlatShard

from olmo_trainer.build import Assembly

KINDS = ("weights", "gradients", "optimizer", "other", "peak", "reserved")


def measure_memory(assembly: Assembly) -> dict[str, int]:
    """Return this rank's bytes by kind, and begin a new peak."""
    parameters = [parameter for _, parameter in assembly.parameters]
    gradients = [p.main_grad for p in parameters if getattr(p, "main_grad", None) is not None]
    state = [
        value.local if isinstance(value, FlatShard) else value
        for value in assembly.optimizer.state_dict().values()
    ]
    weights, held, kept = (_bytes(tensors) for tensors in (parameters, gradients, state))
    device = assembly.mesh.device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        peak = reserved = _resident_bytes()
    other = max(peak - weights - held - kept, 0)
    return dict(zip(KINDS, (weights, held, kept, other, peak, reserved), strict=True))


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Sum what the tensors show, a byte once where they share memory."""
    seen: set[tuple[int, int]] = set()
    for tensor in tensors:
        seen.add((tensor.data_ptr(), tensor.numel() * tensor.element_size()))
    return sum(size for _, size in seen)


def _resident_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
