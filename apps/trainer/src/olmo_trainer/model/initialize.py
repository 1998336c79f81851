"""Initial values by global name: the same tensor under every layout.

Each tensor draws from its own generator, seeded by the run's seed and the tensor's global name
(and, for a stack of experts, the expert's global index), on the CPU in float32. So no two layers or
experts are equal, replicas are bitwise equal, and no layout changes a value.
"""

import hashlib

import torch
from torch import nn

from olmo_trainer.model.moe import MoE


def initialize(module: nn.Module, seed: int, *, first_expert: int = 0) -> None:
    """Fill every parameter of `module`.

    Matrices are normal with deviation `fan_in ** -0.5`, the embedding with 1, norms are 1. The head
    has `1 / fan_in`: first logits near zero, a first loss near the logarithm of the vocabulary.

    Args:
        module: A model part with global parameter names.
        seed: The run's seed.
        first_expert: Global index of the first expert held here.
    """
    stacks = {
        f"{prefix}.experts.{name}"
        for prefix, layer in module.named_modules()
        if isinstance(layer, MoE)
        for name, _ in layer.experts.named_parameters()
    }
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            if name in stacks:
                for local, expert in enumerate(parameter):
                    _normal(
                        expert, f"{name}[{first_expert + local}]", seed, expert.shape[-1] ** -0.5
                    )
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                _normal(parameter, name, seed, _deviation(name, parameter.shape[-1]))


def _deviation(name: str, fan_in: int) -> float:
    if name == "embedding.weight":
        return 1.0
    return 1.0 / fan_in if name == "head.weight" else fan_in**-0.5


def _normal(tensor: torch.Tensor, name: str, seed: int, deviation: float) -> None:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    values = torch.randn(tensor.shape, generator=generator) * deviation
    tensor.copy_(values)
