"""The products of a Newton-Schulz iteration, on a GPU or in Triton's interpreter.

In the interpreter bfloat16 is wrong: there they multiply float32, in tiles of half the width.
"""

import os

import pytest
import torch
from olmo_distopt._newton_schulz import orthogonalize, scale_to_unit

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TILE = 128
HALF_A_PLACE = 2.0**-24 if INTERPRETED else 2.0**-8
# Squares of one tile and of many, tiles with a rest, and shapes that are nearly a vector.
SHAPES = [(2, 128, 64), (1, 136, 8), (3, 264, 328), (2, 8, 520), (1, 520, 24)]
SHAPES += [] if INTERPRETED else [(4, 1536, 4096), (1, 4096, 1000)]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not HOPPER, reason="needs compute capability 9.x"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


def _draw(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(DEVICE, DTYPE)


def _assert_near(got, want, magnitude, length):
    """Within half a place of the result and the rounding of a float32 sum of `length` terms."""
    bound = HALF_A_PLACE * want.abs() + length * 2.0**-24 * magnitude + 1e-30
    assert ((got.double() - want).abs() <= bound).all()


def _assert_symmetric(gram):
    """To the bit: tiles beside the diagonal by construction, those on it because the units are.

    In the interpreter a tile on the diagonal is numpy's product, which on some CPUs is not.
    """
    if INTERPRETED:
        tile = torch.arange(gram.shape[-1]) // TILE
        gram = gram.masked_fill(tile[:, None] == tile, 0)
    assert torch.equal(gram, gram.mT), "a symmetric result must be so to the bit"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_symmetric_product(shape):
    from olmo_distopt._triton.newton_schulz import symmetric_product

    x = _draw(*shape)
    exact, magnitude = x.double() @ x.double().mT, x.double().abs() @ x.double().abs().mT
    gram = symmetric_product(x)
    _assert_near(gram, exact, magnitude, shape[2])
    _assert_symmetric(gram)
    assert torch.equal(gram, symmetric_product(x)), "the same inputs must give the same bits"

    more = symmetric_product(x, gram, alpha=0.5, beta=-3.0)
    terms = 3 * gram.double().abs() + 0.5 * magnitude
    _assert_near(more, 0.5 * exact - 3.0 * gram.double(), terms, shape[2] + 2)
    _assert_symmetric(more)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_that_is_applied(shape):
    from olmo_distopt._triton.newton_schulz import apply

    n, rows, _ = shape
    x, p = _draw(*shape), _draw(n, rows, rows, seed=1)
    exact = p.double() @ x.double() + 2.5 * x.double()
    magnitude = p.double().abs() @ x.double().abs() + 2.5 * x.double().abs()
    _assert_near(apply(p, x, beta=2.5), exact, magnitude, rows + 2)


@pytest.mark.parametrize("shape", [(2, 264, 328), (1, 400, 272), (3, 256, 256), (2, 7, 300)])
def test_orthogonalised_as_by_torch(shape):
    """Wide, tall and square; and sizes that the kernels cannot take."""
    x = scale_to_unit(_draw(*shape).float(), DTYPE)
    mine, want = (
        orthogonalize([x], num_iterations=5, impl=impl)[0] for impl in ("triton", "reference")
    )
    bound = 1e-4 if INTERPRETED else 0.02
    assert (mine - want).norm() <= bound * want.norm()
    zeros = torch.zeros_like(x)
    assert not orthogonalize([zeros], num_iterations=5, impl="triton")[0].any()
