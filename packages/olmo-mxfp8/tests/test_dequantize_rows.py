"""`dequantize_rows` is a gather of what `dequantize` gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_mxfp8 import dequantize, dequantize_rows, quantize


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.integers(-1, 8), max_size=12),
    element=st.sampled_from(["e4m3", "e5m2"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_it_is_a_gather_of_the_values(rows, element, dtype, index):
    x = torch.randn(9, 96)
    x[3], x[4, 5] = 0, torch.nan
    t = quantize(x, element=element)
    got = dequantize_rows(t, torch.tensor(rows, dtype=index), dtype)
    values = torch.cat([dequantize(t, dtype), torch.zeros(1, 96, dtype=dtype)])
    want = values[torch.tensor(rows, dtype=torch.long)]  # -1 is the last row, of zeros
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert got.shape == (len(rows), 96)


def test_nothing_to_choose_from():
    t = quantize(torch.zeros(0, 64))
    got = dequantize_rows(t, torch.tensor([-1, -1]))
    assert torch.equal(got, torch.zeros(2, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": torch.float64}, TypeError, "`dtype` must be float32, bfloat16 or float16"),
        ({"t": quantize(torch.zeros(32, 4), dim=0)}, ValueError, r"`t` must be \(T, K\), quant"),
        ({"rows_R": torch.zeros(2)}, TypeError, "`rows_R` must be int32 or int64, got torch.fl"),
        ({"rows_R": torch.zeros(2, 2).int()}, ValueError, r"`rows_R` must be \(R,\) on the dev"),
        ({"rows_R": torch.tensor([4])}, ValueError, r"`rows_R` must be in \[-1, 4\)"),
        ({"rows_R": torch.tensor([-2])}, ValueError, r"`rows_R` must be in \[-1, 4\)"),
        ({"impl": "torch"}, ValueError, "`impl` must be one of"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(changes, error, message):
    arguments = {"t": quantize(torch.zeros(4, 32)), "rows_R": torch.tensor([1]), **changes}
    with pytest.raises(error, match=message):
        dequantize_rows(**arguments)
