"""torch's scaled grouped product, by a stand-in that holds the caller to its constraints.

No machine here has the units, so nothing shows that torch's kernel computes what the stand-in does:
what is tested is that it is asked rightly, as far as its sources say.
"""

from types import SimpleNamespace

import pytest
import torch
from olmo_mxfp8 import (
    MXRecipe,
    MXTensor,
    _scaled_mm,
    _torch_product,
    dequantize,
    quantize,
    scaled_grouped_mm,
)
from olmo_mxfp8 import _products as products
from olmo_mxfp8._torch_product import torch_row_product, why_not_build, why_not_torch
from torch.nn import functional as F

needs_torch = pytest.mark.skipif(
    not hasattr(F, "scaled_grouped_mm"), reason="this torch has no scaled_grouped_mm"
)
pytestmark = needs_torch


def _bytes_of(tile_rows: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Read a matrix of scale bytes out of tiles of 128 x 4, a byte at a time."""
    wide = -(-columns // 4)
    flat = tile_rows.view(torch.uint8).flatten().tolist()
    found = torch.empty(rows, columns, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * wide + c // 4
            found[r, c] = flat[tile * 512 + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4]
    return found


class StandIn:
    """What torch 2.11 checks on CUDA, and the product that it documents, in float32."""

    def __init__(self):
        self.calls = 0

    def __call__(
        self, mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, *, offs, **rest
    ):
        self.calls += 1
        assert rest == {
            "swizzle_a": F.SwizzleType.SWIZZLE_32_4_4,
            "swizzle_b": F.SwizzleType.SWIZZLE_32_4_4,
            "output_dtype": torch.bfloat16,
        }
        assert scale_recipe_a == scale_recipe_b == F.ScalingType.BlockWise1x32
        (R, K), (E, K_b, N) = mat_a.shape, mat_b.shape
        for matrix in (mat_a, mat_b):
            assert matrix.dtype == torch.float8_e4m3fn
            assert matrix.data_ptr() % 16 == 0
        assert mat_a.is_contiguous()
        assert mat_b.stride() == (N * K, 1, K)
        assert K_b == K
        assert K % 32 == N % 16 == 0
        assert offs.dtype == torch.int32
        assert offs.shape == (E,)
        assert offs.is_contiguous()
        assert R // E > 0, "the kernel would write nothing"
        wide, tall = -(-K // 128) * 4, -(-N // 128) * 128
        for scales in (scale_a, scale_b):
            assert scales.dtype == torch.float8_e8m0fnu
            assert scales.ndim == 2
            assert scales.is_contiguous()
        assert scale_a.shape[0] >= R
        assert scale_a.shape[1] == wide
        assert scale_b.shape == (E, tall * wide)
        # What torch itself checks where there is no device.
        arguments = [t.to("meta") for t in (mat_a, mat_b, scale_a, scale_b, offs)]
        torch.ops.aten._scaled_grouped_mm(*arguments, out_dtype=torch.bfloat16)

        y = torch.full((R, N), torch.nan, dtype=torch.bfloat16)
        start = tiles = 0
        for e, end in enumerate(offs.tolist()):
            rows = end - start
            # The kernel finds an expert's scales behind whole tiles of those before it.
            scales = _bytes_of(scale_a[tiles : tiles + -(-rows // 128) * 128], rows, K // 32)
            a = MXTensor(mat_a[start:end], scales, 1, "e4m3")
            b = MXTensor(mat_b[e].T, _bytes_of(scale_b[e], N, K // 32), 1, "e4m3")
            y[start:end] = (dequantize(a) @ dequantize(b).T).bfloat16()
            start, tiles = end, tiles + -(-rows // 128) * 128
        return y


@pytest.fixture
def stand_in(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(F, "scaled_grouped_mm", stand_in)
    return stand_in


def _offsets(sizes):
    return torch.tensor(sizes).cumsum(0).int()


def _call(a, b, offsets):
    codes = [t.data.view(torch.uint8) for t in (a, b)]
    return torch_row_product(codes[0], a.scales, codes[1], b.scales, offsets)


@pytest.mark.parametrize("sizes", [(5, 32, 27), (0, 5, 3), (129, 0, 0, 127, 1), (7,), (1, 1, 1)])
@pytest.mark.parametrize(("N", "K"), [(16, 32), (144, 160), (128, 128)])
def test_it_is_asked_as_it_wants_and_gives_the_reference(stand_in, sizes, N, K):
    total, spare = sum(sizes), 3
    spread = torch.exp2(torch.randint(-9, 9, (total + spare, K // 32)).float())
    a = quantize(torch.randn(total + spare, K) * spread.repeat_interleave(32, 1))
    b = quantize(torch.randn(len(sizes), N, K) * torch.rand(len(sizes), N, 1))
    a.data.view(torch.uint8)[total:] = 0x7F  # NaN
    a.scales[total:] = 255
    got = _call(a, b, _offsets(sizes))
    want = scaled_grouped_mm(a, b, _offsets(sizes), impl="reference")
    assert stand_in.calls == 1
    assert got.dtype == torch.bfloat16
    assert (got[total:] == 0).all()
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


def test_operands_with_gaps_or_unaligned_are_copied(stand_in):
    a, b = quantize(torch.randn(8, 64)), quantize(torch.randn(2, 16, 64))
    want = _call(a, b, _offsets((3, 5)))
    shifted = torch.cat([a.data.view(torch.uint8).new_zeros(1), a.data.view(torch.uint8).flatten()])
    moved = shifted[1:].view(8, 64).view(torch.float8_e4m3fn)
    assert moved.data_ptr() % 16
    a = MXTensor(moved, a.scales.T.contiguous().T, 1, "e4m3")
    apart = b.data.view(torch.uint8).mT.contiguous().mT.view(torch.float8_e4m3fn)
    b = MXTensor(apart, b.scales.mT.contiguous().mT, 2, "e4m3")
    assert torch.equal(_call(a, b, _offsets((3, 5))), want)


@pytest.mark.parametrize("ends", [(5, 3, 8), (-4, 3, 8), (3, 4, 9)])
def test_offsets_out_of_order_are_an_error(stand_in, ends):
    a, b = quantize(torch.randn(8, 32)), quantize(torch.randn(3, 16, 32))
    with pytest.raises(RuntimeError, match="`offsets_E` must ascend"):
        _call(a, b, torch.tensor(ends, dtype=torch.int32))
    assert stand_in.calls == 0


def test_nothing_to_multiply_asks_nobody(stand_in):
    got = _call(quantize(torch.zeros(0, 32)), quantize(torch.zeros(2, 16, 32)), _offsets((0, 0)))
    assert got.shape == (0, 16)
    assert stand_in.calls == 0


def test_the_operator_keeps_the_rules_of_torch(stand_in):
    a, b = quantize(torch.randn(8, 64)), quantize(torch.randn(2, 16, 64))
    codes = [t.data.view(torch.uint8) for t in (a, b)]
    arguments = (codes[0], a.scales, codes[1], b.scales, _offsets((3, 5)))
    torch.library.opcheck(torch.ops.olmo_mxfp8.torch_row_product.default, arguments)


@pytest.fixture
def blackwell(monkeypatch):
    """A CPU that is taken for a device with scaled units; says what the Triton kernel was given."""
    kernel_calls = []

    def kernel(a_RK, a_scales, a_element, b_ENK, *rest):
        kernel_calls.append((a_element, rest[1]))
        return a_RK.new_zeros(a_RK.shape[0], b_ENK.shape[1], dtype=rest[3])

    monkeypatch.setattr(_torch_product, "why_not_build", lambda: None)
    monkeypatch.setattr(_scaled_mm, "pick_product", lambda impl, *rest: impl)
    monkeypatch.setattr(products, "scaled_row_product", kernel)
    return kernel_calls


def test_native_takes_torchs_product_where_it_can(stand_in, blackwell):
    a, b = quantize(torch.randn(9, 64)), quantize(torch.randn(2, 32, 64))
    got = scaled_grouped_mm(a, b, _offsets((4, 3)), impl="native")
    assert (stand_in.calls, blackwell) == (1, [])
    torch.testing.assert_close(got, scaled_grouped_mm(a, b, _offsets((4, 3)), impl="reference"))
    assert scaled_grouped_mm(a, b, _offsets((4, 3)), impl="reference").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("rows", "experts", "width", "elements", "out_dtype", "reason"),
    [
        (9, 2, 32, ("e5m2", "e4m3"), torch.bfloat16, "both elements must be e4m3"),
        (9, 2, 32, ("e4m3", "e5m2"), torch.bfloat16, "both elements must be e4m3"),
        (9, 2, 32, ("e4m3", "e4m3"), torch.float32, "its result is bfloat16"),
        (9, 2, 24, ("e4m3", "e4m3"), torch.bfloat16, "multiple of 16, got 24"),
        (3, 4, 32, ("e4m3", "e4m3"), torch.bfloat16, "at least as many rows as experts"),
    ],
)
def test_native_takes_the_kernel_where_torchs_product_cannot(
    stand_in, blackwell, rows, experts, width, elements, out_dtype, reason
):
    a = quantize(torch.randn(rows, 32), element=elements[0])
    b = quantize(torch.randn(experts, width, 32), element=elements[1])
    assert reason in why_not_torch(a, b, out_dtype)
    offsets = torch.zeros(experts, dtype=torch.int32)
    scaled_grouped_mm(a, b, offsets, out_dtype=out_dtype, impl="native")
    assert stand_in.calls == 0
    assert blackwell == [elements]


def test_torchs_product_is_for_10_alone(monkeypatch):
    """Where there are other units that take scales the kernel multiplies."""
    monkeypatch.setattr(_torch_product, "why_not_build", lambda: None)
    on_cuda = (
        SimpleNamespace(shape=(9, 64), element="e4m3", device=torch.device("cuda", 0)),
        SimpleNamespace(shape=(2, 32, 64), element="e4m3"),
    )
    for capability, reason in [
        ((10, 0), None),
        ((10, 3), None),
        ((12, 0), "it is for compute capability 10.x, this device has (12, 0)"),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert why_not_torch(*on_cuda, torch.bfloat16) == reason


def test_other_builds_of_torch_say_so(monkeypatch):
    def reason():
        _torch_product._why_not_build.cache_clear()
        return why_not_build()

    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.__config__, "show", lambda: "-DUSE_CUDNN")
        assert "built without its kernels" in reason()
        patch.setattr(torch.__config__, "show", lambda: "-DUSE_MSLK -DUSE_CUDNN")
        assert reason() is None
        patch.setattr(torch.version, "cuda", "12.6")
        assert "CUDA 12.8 or newer, this one is for 12.6" in reason()
        patch.setattr(torch.version, "cuda", None)
        assert "CUDA 12.8 or newer, this one is for None" in reason()
        patch.delattr(F, "scaled_grouped_mm")
        assert "has no scaled_grouped_mm" in reason()
    _torch_product._why_not_build.cache_clear()


def test_a_layer_trains_through_it(stand_in, blackwell, monkeypatch):
    """Forward and input gradient; the weight gradient has no scales to give it."""
    from olmo_mxfp8 import _functional, mx_grouped_mm

    monkeypatch.setattr(_functional, "pick_for", lambda recipe, *rest: "native")
    monkeypatch.setattr(
        _functional,
        "multiply_across_rows",
        lambda dy, x, groups, impl, dtype: x.new_zeros(2, dy.shape[1], x.shape[1], dtype=dtype),
    )
    x, w = torch.randn(9, 64).bfloat16(), torch.randn(2, 32, 64).bfloat16()
    results = []
    for recipe in (MXRecipe(), MXRecipe(impl="reference")):
        leaf = x.clone().requires_grad_()
        y = mx_grouped_mm(leaf, w.clone().requires_grad_(), _offsets((4, 3)), recipe=recipe)
        (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        results.append((y.detach(), dx))
        if recipe.impl == "auto":
            assert stand_in.calls == 2
            monkeypatch.undo()
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
