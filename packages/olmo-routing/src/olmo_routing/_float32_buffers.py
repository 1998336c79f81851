"""A module whose buffers stay float32 in a model of any precision.

They are sums over steps: an addend of 0.001 is lost beside 1 in bfloat16, and a count of routes in
float16 above 65504. Conversions of the model (`half`, `to(dtype)`) and checkpoints that were saved
in another precision are where they would lose it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Float32Buffers(nn.Module):
    """Keep the module's own buffers float32; they move between devices as any others."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Float32Buffers":
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            before = exact[name]
            if buffer is not None and before is not None and buffer.dtype != torch.float32:
                self._buffers[name] = before.to(buffer.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # `assign=True` puts the checkpoint's own tensor in the place of the buffer.
        own = {prefix + name for name in self._buffers}
        exact = {
            key: value.float() if key in own and isinstance(value, Tensor) else value
            for key, value in state_dict.items()
        }
        super()._load_from_state_dict(exact, prefix, *args, **kwargs)
