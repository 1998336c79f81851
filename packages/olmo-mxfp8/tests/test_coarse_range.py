"""The ends of the scales that `coarse` multiplies, inside of which its bound holds.

The kernel runs on Hopper alone. A CPU runs the same arithmetic in torch, so that what is expected
of the kernel is checked where there is none.
"""

import pytest
import torch
from olmo_mxfp8 import MXTensor, dequantize, scaled_mm

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
LEAST, ONE, TWO, LARGEST = 0x01, 0x38, 0x40, 0x7E  # 2^-9, 1, 2 and 448 in E4M3

# The bytes of both scales, a code of `a`, how often it is multiplied by 1, what that is in float32,
# and, where it differs, what `coarse` makes of it.
INSIDE = [
    ((254, 127), ONE, 1, 2.0**127),
    ((191, 190), LEAST, 1, 2.0**118),
    ((190, 191), TWO, 1, torch.inf),
    ((0, 105), ONE, 1, 2.0**-149),
    ((53, 52), ONE, 128, 2.0**-142),
    ((105, 0), LARGEST, 128, 448 * 2.0**-142),
    ((0, 254), ONE, 1, 1.0),
]
OUTSIDE = [
    # One more than the largest: half of what it should be, but for what overflows.
    ((191, 191), LEAST, 1, 2.0**119, 2.0**118),
    ((191, 191), ONE, 1, torch.inf, 2.0**127),
    ((191, 191), TWO, 1, torch.inf, torch.inf),
    ((191, 191), 0, 1, 0.0, 0.0),
    ((254, 254), LEAST, 1, torch.inf, 2.0**118),
    ((254, 254), 0, 128, 0.0, 0.0),
    # One less than the smallest: nothing, of whatever size.
    ((0, 104), ONE, 128, 2.0**-143, 0.0),
    ((52, 52), LARGEST, 128, 448 * 2.0**-143, 0.0),
    ((0, 0), LARGEST, 1, 0.0, 0.0),
]
CASES = [*((*case, case[-1]) for case in INSIDE), *OUTSIDE]
cases = pytest.mark.parametrize(("scales", "code", "times", "exact", "want"), CASES)


def operands(scales, code, times):
    """`times` products of `code` and 1 in the second of two steps; the first is all 0."""
    a, b = (torch.zeros(n, 256, dtype=torch.uint8) for n in (3, 128))
    a[1, 128 : 128 + times], b[:, 128:] = code, ONE
    made = []
    for codes, byte, granularity in ((a, scales[0], 128), (b, scales[1], "128x128")):
        bytes_ = torch.full((len(codes), 8), byte, dtype=torch.uint8)
        made.append(MXTensor(codes.view(torch.float8_e4m3fn), bytes_, 1, "e4m3", granularity))
    return made


def as_the_kernel(a, b):
    """A step of 128 at a time: codes multiplied, both scales multiplied, and one by the other."""
    total = torch.zeros(a.shape[0], b.shape[0])
    for step in range(a.shape[1] // 128):
        at = slice(128 * step, 128 * step + 128)
        product = a.data[:, at].float() @ b.data[:, at].float().T
        ours, theirs = (torch.exp2(t.scales[:, 4 * step].double() - 127).float() for t in (a, b))
        scale = ours[:, None] * theirs[None, :]
        scale = torch.where(scale == torch.inf, 2.0**127, scale)
        # What is added is rounded once, with the sum.
        total = (total.double() + product.double() * scale.double()).float()
    return total


def assert_is(got, want):
    assert (got[1] == want).all(), got[1, 0]
    assert (got[[0, 2]] == 0).all()


@cases
def test_the_arithmetic_of_the_kernel(scales, code, times, exact, want):
    a, b = operands(scales, code, times)
    assert_is(as_the_kernel(a, b), want)
    inside = 105 <= sum(scales) <= 381
    assert inside == ((scales, code, times, exact) in INSIDE)
    values = [dequantize(t, torch.float64) for t in (a, b)]
    assert_is((values[0] @ values[1].T).float(), exact)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.x")
@cases
def test_the_kernel(scales, code, times, exact, want):
    a, b = (t.to("cuda") for t in operands(scales, code, times))
    assert_is(scaled_mm(a, b, out_dtype=torch.float32, impl="coarse").cpu(), want)
