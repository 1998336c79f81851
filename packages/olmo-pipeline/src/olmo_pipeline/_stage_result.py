"""What a stage returns: its output, an auxiliary loss, and metrics."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

StageResult = (
    tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Mapping[str, Tensor] | None]
)
StageFunction = Callable[[Tensor | None, Any], StageResult]


def unpack(stage: int, returned: Any) -> tuple[Tensor, Tensor | None, dict[str, Tensor] | None]:
    """Return output, auxiliary loss and metrics of what a stage returned.

    Raises:
        ValueError: If it is something else. A tensor of two rows could be taken apart like a pair.
    """
    is_result = isinstance(returned, tuple | list) and len(returned) in (2, 3)
    if not is_result or not isinstance(returned[0], Tensor):
        raise ValueError(
            f"stage {stage} must return (output, auxiliary loss or None) with a tensor as its "
            f"output, and a dict of metrics as a third if it has any, got {_describe(returned)}."
        )
    output, auxiliary, *rest = returned
    if auxiliary is not None and not isinstance(auxiliary, Tensor):
        raise ValueError(
            f"the auxiliary loss of stage {stage} must be a scalar tensor or None, got "
            f"{_describe(auxiliary)}."
        )
    metrics = rest[0] if rest else None
    return output, auxiliary, None if metrics is None else _check_metrics(stage, metrics)


def _check_metrics(stage: int, metrics: Any) -> dict[str, Tensor]:
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"the metrics of stage {stage} must be a dict of tensors by name, got "
            f"{_describe(metrics)}."
        )
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"the metrics of stage {stage} must be tensors by name, got {_describe(value)} "
                f"at {name!r}."
            )
        if value.requires_grad:
            raise ValueError(
                f"the metrics of stage {stage} must not carry gradients, {name!r} does; detach it, "
                f"or return it as the auxiliary loss."
            )
    return dict(metrics)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_describe, value))})"
    return "None" if value is None else type(value).__name__
