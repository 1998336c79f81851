"""Swizzled scales against a loop over rows and columns."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_mxfp8 import quantize, swizzle_scales, unswizzle_scales


def _place(row, column, columns):
    """Where a byte lies, from the words of the layout."""
    across = -(-columns // 4)
    tile = row // 128 * across + column // 4
    r, c = row % 128, column % 4
    return tile * 512 + 16 * (r % 32) + 4 * (r // 32) + c


def _scales(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 255, (rows, columns), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("rows", [1, 127, 128, 129])
@pytest.mark.parametrize("columns", [1, 3, 4, 5])
def test_each_byte_lies_in_its_place_and_padding_is_zero(rows, columns):
    scales = _scales(rows, columns)
    swizzled = swizzle_scales(scales)
    want = torch.zeros(-(-rows // 128) * -(-columns // 4) * 512, dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            want[_place(row, column, columns)] = scales[row, column]
    assert torch.equal(swizzled, want)
    assert torch.equal(unswizzle_scales(swizzled, rows, columns), scales)


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 31, 127, 128, 129, 200]), min_size=1, max_size=5),
    tail=st.integers(0, 5),
    columns=st.integers(1, 6),
)
def test_each_expert_begins_a_tile(counts, tail, columns):
    rows = sum(counts) + tail
    scales = _scales(rows, columns)
    offsets = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
    swizzled = swizzle_scales(scales, offsets)
    start = begin = 0
    seen = torch.zeros_like(swizzled, dtype=torch.bool)
    for count in counts:
        height = -(-count // 128) * 128
        size = height * (-(-columns // 4) * 4)
        alone = swizzle_scales(scales[start : start + count])
        assert torch.equal(swizzled[begin : begin + size], alone)
        seen[begin : begin + size] = True
        start, begin = start + count, begin + size
    assert (swizzled[~seen] == 0).all()
    back = unswizzle_scales(swizzled, rows, columns, offsets)
    used = sum(counts)
    assert torch.equal(back[:used], scales[:used])
    assert (back[used:] == 0).all()


def test_the_scales_of_a_quantised_matrix_come_back():
    t = quantize(torch.randn(70, 96, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(unswizzle_scales(swizzle_scales(t.scales), 70, 3), t.scales)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s, o: swizzle_scales(s.int()), TypeError, "`scales` must be torch.uint8"),
        (lambda s, o: swizzle_scales(s[0]), ValueError, "two dimensions"),
        (lambda s, o: swizzle_scales(s, o.long()), TypeError, "must be int32"),
        (lambda s, o: swizzle_scales(s, o[:0]), ValueError, "one end for each"),
        (lambda s, o: swizzle_scales(s, o[None]), ValueError, r"\(E,\), got \(1, 1\)"),
        (lambda s, o: swizzle_scales(s, o + 1), ValueError, "must ascend .* at most .* 5"),
        (lambda s, o: swizzle_scales(s, -o), ValueError, "must ascend from at least 0"),
        (lambda s, o: swizzle_scales(s, torch.cat([o, o - 1])), ValueError, "must ascend"),
        (lambda s, o: swizzle_scales(s, o.to("meta")), ValueError, "of the rows, cpu, got meta"),
        (lambda s, o: unswizzle_scales(s, 5, 3, o + 1), ValueError, "must ascend"),
        (lambda s, o: unswizzle_scales(s, 5, 3, o.to("meta")), ValueError, "of the rows, cpu"),
        (lambda s, o: unswizzle_scales(s[:0], -1, 3), ValueError, "`rows` and `cols` must be .* 0"),
        (lambda s, o: unswizzle_scales(s.flatten(), 5, 3), ValueError, "must hold 128 x 4 bytes"),
        (lambda s, o: unswizzle_scales(s.int(), 5, 3), TypeError, "must be torch.uint8"),
    ],
)
def test_bad_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(_scales(5, 3), torch.tensor([5], dtype=torch.int32))
