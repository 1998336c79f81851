"""Whether torch is asked for more than a first backward: forward mode, or a torch.func transform.

A custom operator knows its backward alone. It has no forward-mode derivative, and torch then takes
it to be zero without a word; it has no rule for `vmap` either. Where this is True, plain torch runs
in the place of such operators.
"""

import torch
from torch.autograd import forward_ad


def under_transform() -> bool:
    """Return whether a forward-mode level is open or a torch.func transform is at work."""
    # Neither has a public question.
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
