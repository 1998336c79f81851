"""What a parameter is, told by its name and shape, as the rules of decay and of Muon ask.

A name's dotted parts are matched in lower case, but for the short names of biases, whose capital
`B` would be a matrix. The question is put to the whole parameter, never to a shard of it.
"""

import re

from torch import nn

_NORM = re.compile(r"norm|^ln$|^ln_|^ln\d+$|^ln\w$|_ln$|^rms")
_BIAS = re.compile(r"(^|_)bias(es)?($|_)")
_SHORT_BIAS = re.compile(r"^b\d*$|^b_")
_ROUTER = re.compile(r"router|^gate$")
_EMBEDDING = re.compile(r"embed|^wte$|^wpe$")
_HEAD = re.compile(r"(^|_)head$|^unembed|^output$")


def is_norm(name: str) -> bool:
    """Say whether a part contains `norm`, begins with `rms`, or is such as `ln`, `ln1`, `ln_f`.

    `ln_attn` and `attn_ln` are norms too.
    """
    return _any(_NORM, name)


def is_bias(name: str) -> bool:
    """Say whether a part has the word `bias` (a selection bias too), or the last names one.

    The last part does if it contains `bias`, is `b` or `b1`, or begins with `b_`, as `b_down_ED`.
    It is the parameter's own: `b_proj.weight` is a weight. Numbers after it, of a list of
    parameters, do not count.
    """
    own = next((part for part in reversed(name.split(".")) if not part.isdecimal()), "")
    return _any(_BIAS, name) or "bias" in own.lower() or bool(_SHORT_BIAS.search(own))


def is_router(name: str) -> bool:
    """Say whether a part contains `router` or is `gate` (a dense layer's is `gate_proj`)."""
    return _any(_ROUTER, name)


def is_embedding(name: str) -> bool:
    """Say whether a part contains `embed`, or is `wte` or `wpe`; `unembed` is a head."""
    return _any(_EMBEDDING, name) and not is_head(name)


def is_head(name: str) -> bool:
    """Say whether a part is `head` or ends in `_head`, is `output`, or begins with `unembed`."""
    return _any(_HEAD, name)


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Say whether Muon is for it: a matrix, or a stack of them, between the ends of the model.

    Two or three dimensions, and neither norm, bias, embedding, head nor router.

    Args:
        name: global name, such as `blocks.3.experts.w_down_EDH`.
        parameter: the parameter as this process holds it.
    """
    others = (is_norm, is_bias, is_embedding, is_head, is_router)
    return parameter.ndim in (2, 3) and not any(kind(name) for kind in others)


def _parts(name: str) -> list[str]:
    return name.lower().split(".")


def _any(pattern: re.Pattern[str], name: str) -> bool:
    return any(pattern.search(part) for part in _parts(name))
