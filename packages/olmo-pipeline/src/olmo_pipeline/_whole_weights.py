"""Which weights a split backward does not leave for later, and what to call them.

A weight whose gradient waits has no edge in the graph of its stage (`_split_backward`); the others
are found by a walk over that graph. Vectors (norms, biases) and weights that are only looked up,
added or scaled by, as they are or in part, are left out: their gradients are no products and cost
little wherever they come.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

_CHEAP = frozenset(
    (
        *("Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather"),
        *("Add", "Sub", "Rsub", "Mul", "Div", "Lerp", "Where", "Neg", "Pow"),
        *("NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm"),
    )
)
_VIEWS = frozenset(  # and copies: it depends on who reads them
    (
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided", "Clone", "ToCopy"),
        *("Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Narrow", "Unfold"),
        *("Squeeze", "Unsqueeze", "Expand", "T", "Transpose", "Permute", "Cat", "Stack"),
    )
)
_MOST_NAMES = 8


def whole_weights(roots: Iterable[Tensor]) -> list[nn.Parameter]:
    """Return the matrices and larger weights that a backward from `roots` gives a gradient."""
    # A node, and whether who reads its result does more than look up, add or scale.
    waiting: list[tuple[Node, bool]] = [
        (root.grad_fn, False) for root in roots if root.grad_fn is not None
    ]
    seen = set(waiting)
    found: dict[nn.Parameter, None] = {}  # parameters hash by identity
    while waiting:
        node, is_read_dearly = waiting.pop()
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        is_dear = is_read_dearly if kind in _VIEWS else kind not in _CHEAP
        for following, _ in node.next_functions:
            if following is None:
                continue
            leaf = getattr(following, "variable", None)  # of the node that adds to a `.grad`
            if isinstance(leaf, nn.Parameter) and leaf.dim() > 1 and is_dear:
                found[leaf] = None
            if (following, is_dear) not in seen:
                seen.add((following, is_dear))
                waiting.append((following, is_dear))
    return list(found)


def names_of(weights: Iterable[nn.Parameter], stage: Callable[..., Any]) -> str:
    """Return a list of names for a message, shapes where the stage does not tell the names."""
    given = dict.fromkeys(weights)
    names: dict[nn.Parameter, str] = {}  # in the order of the modules
    for module in _modules_of(stage):
        names |= {w: name for name, w in module.named_parameters() if w in given}
    names |= {w: f"a parameter of shape {tuple(w.shape)}" for w in given if w not in names}
    listed, rest = list(names.values())[:_MOST_NAMES], len(names) - _MOST_NAMES
    return ", ".join(listed) + (f" and {rest} more" if rest > 0 else "")


def _modules_of(stage: Callable[..., Any]) -> list[nn.Module]:
    """Return the module that the stage is, or those that it is a method of or holds."""
    owner = getattr(stage, "__self__", stage)
    held = [owner, *getattr(owner, "__dict__", {}).values()]
    return [value for value in held if isinstance(value, nn.Module)]
