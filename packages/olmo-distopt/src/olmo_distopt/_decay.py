"""Which parameters weight decay applies to."""

from dataclasses import dataclass

from torch import nn

from ._parameter_kinds import is_bias, is_embedding, is_norm, is_router


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayPolicy:
    """A rule of weight decay by what a parameter is; call it as `(name, parameter) -> bool`.

    Norms and biases never decay, stacked ones included, whose two dimensions would fool a rule by
    shape, nor does the selection bias of a router. All other tensors of two or more dimensions do,
    apart from the choices below. What is what: by name, see `_parameter_kinds`.

    Attributes:
        embeddings: whether embeddings decay.
        routers: whether a router's weight decays, also one stored as a line (its last part begins
            with `w`).
    """

    embeddings: bool = True
    routers: bool = True

    def __call__(self, name: str, parameter: nn.Parameter) -> bool:
        """Say whether weight decay applies.

        Args:
            name: global name, such as `blocks.3.attention.q_norm.weight`.
            parameter: the parameter as this process holds it, whole.
        """
        if is_norm(name) or is_bias(name):
            return False
        if is_router(name):
            flattened = name.rpartition(".")[2].lower().startswith("w")
            return self.routers and (parameter.ndim >= 2 or flattened)
        if is_embedding(name):
            return self.embeddings
        return parameter.ndim >= 2


def decays_matrices(name: str, parameter: nn.Parameter) -> bool:
    """Say whether weight decay applies, by `DecayPolicy()`: embeddings and routers decay too."""
    return DecayPolicy()(name, parameter)
