"""Which parameters weight decay applies to."""

import re

from torch import nn

_NORM = re.compile(r"norm|^ln$|^ln_?\w$")


def decays_matrices(name: str, parameter: nn.Parameter) -> bool:
    """Say whether weight decay applies: to tensors of two or more dimensions, by name.

    Norms and biases do not decay, stacked ones included, whose two dimensions would fool a rule by
    shape: a name with a dotted part that contains `norm` or is `ln`, `ln1`, `ln_f`, or whose last
    part contains `bias`. Embeddings and routers are matrices and decay. The question is put to the
    whole parameter, never to a shard of it.

    Args:
        name: global name, such as `blocks.3.attention.q_norm.weight`.
        parameter: the parameter as this process holds it.
    """
    parts = name.lower().split(".")
    named_otherwise = "bias" in parts[-1] or any(_NORM.search(part) for part in parts)
    return parameter.ndim >= 2 and not named_otherwise
