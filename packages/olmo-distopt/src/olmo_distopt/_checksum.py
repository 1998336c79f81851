"""A checksum of a tensor's bits, to find out whether two processes hold the same values.

Of the elements' bits b, read as signed integers and cut into chunks of C,

    checksum = sum_i k_i b_i  (mod 2^64),    k_i = key[i mod C] * m^(number of chunks after i's)

with m and every key odd. An odd factor can be divided by modulo 2^64, so two tensors that differ in
one element never have the same checksum; tensors drawn independently, permuted or shifted by a
constant have it by rare accident alone. Integer sums do not depend on their order: the
checksum is the same on every device.
"""

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**20  # bounds the temporaries: 8 bytes an element, a few times
_CHUNK_FACTOR = 0x2545F4914F6CDD1D
_KEY_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of the bits of a contiguous tensor, a 0-d int64 on its device.

    Args:
        tensor: any shape, any dtype of 1, 2, 4 or 8 bytes an element. Two tensors of other shapes
            or dtypes are not to be compared.

    Note:
        O(numel) work and O(1) memory; nothing is read back from the device.
    """
    bits = tensor.detach().view(-1).view(_INTEGERS[tensor.element_size()])
    keys = _keys(min(bits.numel(), _CHUNK), bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = total * _CHUNK_FACTOR + (chunk * keys[: chunk.numel()]).sum()
    return total


def _keys(length: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers; products wrap around."""
    first, second = _KEY_FACTORS
    keys = torch.arange(1, length + 1, dtype=torch.int64, device=device) * first
    return (((keys ^ (keys >> 31)) * second) ^ (keys >> 17)) | 1
