"""The dtypes that the moments of an optimizer may be kept in."""

import torch

# A BF16 number is not moved by less than half its spacing, which is up to 2^-7 of its value. A
# moment that decays by less than that a step would never decay.
_LEAST_BF16_DECAY = 2.0**-8


def require_moment_dtype(dtype: torch.dtype, name: str, *decays: float) -> None:
    """Raise unless moments of `dtype` can decay as they should.

    Args:
        dtype: of the moments.
        name: the argument that holds `decays`, for the message.
        decays: what is kept of each moment in a step, in [0, 1).

    Raises:
        ValueError: `dtype` is neither float32 nor bfloat16, or too coarse for a decay.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"`moment_dtype` must be float32 or bfloat16, got {dtype}.")
    if dtype == torch.bfloat16 and max(decays) > 1 - _LEAST_BF16_DECAY:
        raise ValueError(
            f"`{name}` must be at most 1 - 2^-8 with bfloat16 moments, got {max(decays)}: a moment "
            "that changes by less a step is rounded back; use float32 moments."
        )
