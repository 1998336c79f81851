"""What is refused, and that the message says what must hold, what was given and what to do."""

import re

import pytest
import torch
from olmo_experts_gemm import Experts, _triton_product, grouped_mm, moe_mlp, swiglu_experts
from olmo_experts_gemm._grouped_mm import pick

X = torch.zeros(5, 8)
W = torch.zeros(3, 4, 8)
OFFSETS = torch.tensor([1, 3, 5], dtype=torch.int32)


def _offsets(*ends):
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X.int(), W, OFFSETS), TypeError, "`x_RD` must be float16, bfloat16, .* got int32"),
        ((X.to(torch.complex64), W, OFFSETS), TypeError, "float64, got complex64"),
        ((X.to(torch.float8_e4m3fn), W, OFFSETS), TypeError, "got float8_e4m3fn"),
        (
            (X[None], W, OFFSETS),
            ValueError,
            r"`x_RD` must have 2 dimensions, got shape \(1, 5, 8\); flatten batch and sequence",
        ),
        (
            (X, W.double(), OFFSETS),
            TypeError,
            "the dtype of `x_RD`, float32, got float64; cast one",
        ),
        ((X, W.mT, OFFSETS), ValueError, r"shape \(E, F, D=8\) .* got \(3, 8, 4\) for .*\(5, 8\)"),
        ((X, W[0], OFFSETS), ValueError, r"`w_EFD` must have shape .* got \(4, 8\)"),
        ((X, W[:0], OFFSETS[:0]), ValueError, r"at least one expert, got \(0, 4, 8\)"),
        (
            (X, W.to("meta"), OFFSETS),
            ValueError,
            "`w_EFD` must be on the device of .* cpu, got meta",
        ),
        ((X, W, OFFSETS.long()), TypeError, r"`offsets_E` must be int32, got int64; call `.to\("),
        ((X, W, OFFSETS.to("meta")), ValueError, "`offsets_E` must be on the device of `x_RD`"),
        ((X, W, OFFSETS[:2]), ValueError, r"`offsets_E` must have shape \(3,\), .* got \(2,\)"),
        ((X, W, OFFSETS[:, None]), ValueError, r"got \(3, 1\)"),
        ((X, W, _offsets(1, 3, 6)), ValueError, "at most the 5 rows of `x_RD`, got 6 after 3"),
        (
            (X, W, _offsets(3, 2, 5)),
            ValueError,
            "must not decrease, .* got 2 after 3; pass inclusive",
        ),
        ((X, W, _offsets(-1, 2, 5)), ValueError, "got -1 after 0"),
    ],
)
def test_grouped_mm_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        grouped_mm(*arguments)


@pytest.mark.parametrize(
    ("dtype", "D", "F", "reason"),
    [
        (torch.float64, 8, 4, "it multiplies bfloat16, float16 or float32, not float64"),
        (torch.float32, 6, 4, r"every width must be a multiple of 4 \(16 bytes\), got 6"),
        (torch.bfloat16, 8, 4, r"every width must be a multiple of 8 \(16 bytes\), got 4"),
    ],
)
def test_a_named_product_that_cannot_run_says_why(dtype, D, F, reason):
    x, w = torch.zeros(5, D, dtype=dtype), torch.zeros(3, F, D, dtype=dtype)
    with pytest.raises(ValueError, match=f"`impl='torch'` cannot run.*{reason}; use impl='ref"):
        grouped_mm(x, w, OFFSETS, impl="torch")
    assert grouped_mm(x, w, OFFSETS).shape == (5, F)


@pytest.mark.parametrize("impl", ["cuda", None, "Auto"])
def test_unknown_products_are_refused(impl):
    with pytest.raises(
        ValueError, match=f"must be 'auto', 'reference', 'torch' or 'triton', got {impl!r}"
    ):
        grouped_mm(X, W, OFFSETS, impl=impl)


def test_triton_says_why_it_cannot_run_here():
    message = "`impl='triton'` cannot run: .*; use impl='auto', 'torch' or 'reference'"
    with pytest.raises(ValueError, match=message):
        grouped_mm(X, W, OFFSETS, impl="triton")
    with pytest.raises(ValueError, match=message):
        swiglu_experts(X, GATE_UP, DOWN, OFFSETS, impl="triton")
    with pytest.raises(ValueError, match=message):
        moe_mlp(X, IDS, WEIGHTS, GATE_UP, DOWN, impl="triton")
    reason = _triton_product.why_not(X.to("meta"), 5, 3, 8, 4)
    assert reason == "it runs on CUDA, not on meta"


def test_triton_says_when_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(_triton_product, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed here"):
        grouped_mm(X, W, OFFSETS, impl="triton")
    assert grouped_mm(X, W, OFFSETS).shape == (5, 4)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ((5, 3, 8, 12), "every width must be a positive multiple of 8, got 12"),
        ((5, 3, 0, 16), "every width must be a positive multiple of 8, got 0"),
        ((5, 513, 8, 16), "it takes up to 512 experts, got 513"),
        ((2**30, 3, 8, 16), r"it takes fewer than 2\^30 rows, got 1073741824"),
    ],
)
def test_triton_names_its_limits(monkeypatch, limits, reason):
    monkeypatch.setattr(_triton_product, "_why_not_device", lambda *_: None)
    assert _triton_product.why_not(X, 2**30 - 1, 512, 8, 16) is None
    with pytest.raises(ValueError, match=f"`impl='triton'` cannot run: {reason}; use impl='auto'"):
        pick("triton", X, *limits)


MAIN = torch.zeros(3, 4, 8)


@pytest.mark.parametrize(
    ("main_grad", "error", "message"),
    [
        (MAIN.half(), TypeError, "`main_grad_EFD` must be float32, got float16"),
        (MAIN.to("meta"), ValueError, "`main_grad_EFD` must be on the device of `w_EFD`"),
        (MAIN[:2], ValueError, r"the shape of `w_EFD`, \(3, 4, 8\), got shape \(2, 4, 8\)"),
        (MAIN.mT.contiguous().mT, ValueError, r"contiguous .* strides \(32, 1, 4\)"),
        (MAIN.clone().requires_grad_(), ValueError, "must not require a gradient"),
    ],
)
def test_main_grads_are_plain_float32_buffers(main_grad, error, message):
    with pytest.raises(error, match=message):
        grouped_mm(X, W, OFFSETS, main_grad_EFD=main_grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, of jvp
def test_forward_mode_is_refused_for_it_would_be_lost():
    calls = [
        lambda x: grouped_mm(x, W, OFFSETS),
        lambda x: swiglu_experts(x, GATE_UP, DOWN, OFFSETS),
        lambda x: moe_mlp(x, IDS, WEIGHTS, GATE_UP, DOWN),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"Forward-mode .* got a dual tensor; use"):
            torch.func.jvp(call, (X,), (X,))


GATE_UP, DOWN = torch.zeros(3, 8, 8), torch.zeros(3, 8, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x_RD": X.long()}, TypeError, "`x_RD` must be float16"),
        ({"w_down_EDH": DOWN.mT}, ValueError, r"`w_down_EDH` must have shape \(E, D=8, H\)"),
        (
            {"w_gate_up_E2HD": GATE_UP[:, :6]},
            ValueError,
            r"\(E, 2H, D\) = \(3, 8, 8\) .* \(3, 6, 8\)",
        ),
        ({"w_gate_up_E2HD": GATE_UP[:2]}, ValueError, r"got \(2, 8, 8\)"),
        ({"w_gate_up_E2HD": GATE_UP.half()}, TypeError, "`w_gate_up_E2HD` must have the dtype"),
        ({"offsets_E": _offsets(1, 3, 6)}, ValueError, "got 6 after 3"),
        (
            {"row_weights_R": torch.ones(5).int()},
            TypeError,
            "`row_weights_R` must be floats, got int32",
        ),
        ({"row_weights_R": torch.ones(4)}, ValueError, r"must have shape \(5,\), .* got \(4,\)"),
        ({"row_weights_R": torch.ones(5, device="meta")}, ValueError, "`row_weights_R` must be on"),
        (
            {"impl": "torch", "matmul": grouped_mm},
            ValueError,
            "must stay 'auto' when `matmul` is given",
        ),
        (
            {"matmul": grouped_mm, "main_grads": (GATE_UP, DOWN)},
            ValueError,
            "`main_grads` must stay None when `matmul` is given",
        ),
        ({"matmul": grouped_mm, "pack": object()}, ValueError, "`pack` must stay None when"),
        (
            {"activation": "gelu"},
            ValueError,
            "one of 'swiglu', 'geglu', 'relu_squared', 'clamped_swiglu', got 'gelu'",
        ),
        (
            {"activation": "relu_squared"},
            ValueError,
            r"\(E, H, D\), without a gate, = \(3, 4, 8\) .* \(3, 8, 8\)",
        ),
        ({"b_gate_up_E2H": torch.zeros(3, 4)}, ValueError, r"shape \(3, 8\), .* got \(3, 4\)"),
        ({"b_down_ED": torch.zeros(8)}, ValueError, r"`b_down_ED` .* shape \(3, 8\), .* \(8,\)"),
        (
            {"b_down_ED": torch.zeros(3, 8).half()},
            TypeError,
            "`b_down_ED` must have the dtype of `w_down_EDH`, float32, got float16; cast one",
        ),
        ({"b_down_ED": torch.zeros(3, 8, device="meta")}, ValueError, "`b_down_ED` must be on"),
        ({"main_grads": (GATE_UP,)}, ValueError, "`main_grads` must be two buffers, .* got 1"),
        (
            {"main_grads": (GATE_UP, GATE_UP)},
            ValueError,
            r"`main_grads\[1\]` must be contiguous and have the shape of `w_down_EDH`",
        ),
        (
            {"matmul": lambda x, w, o: x[:, :3]},
            ValueError,
            r"return float32 of shape \(5, 8\), .*\(5, 3\)",
        ),
        (
            {"matmul": lambda x, w, o: x.half()},
            ValueError,
            "`matmul` must return float32 .* got float16",
        ),
        (
            {"matmul": lambda x, w, o: (x, None)},
            TypeError,
            "`matmul` must return a tensor, got tuple",
        ),
    ],
)
def test_swiglu_experts_refuses(change, error, message):
    arguments = {"x_RD": X, "w_gate_up_E2HD": GATE_UP, "w_down_EDH": DOWN, "offsets_E": OFFSETS}
    with pytest.raises(error, match=message):
        swiglu_experts(**{**arguments, **change})


def test_a_product_that_fits_one_of_the_two_is_refused_before_either_runs():
    x = torch.zeros(5, 8)
    with pytest.raises(ValueError, match=r"every width must be a multiple of 4 .* got 2"):
        swiglu_experts(x, torch.zeros(3, 4, 8), torch.zeros(3, 8, 2), OFFSETS, impl="torch")


IDS = torch.tensor([[0, 1], [2, -1], [1, 0], [-1, -1], [2, 1]])
WEIGHTS = torch.ones(5, 2)


@pytest.mark.parametrize(
    ("ids", "weights", "error", "message"),
    [
        (IDS.float(), WEIGHTS, TypeError, "`expert_ids_TK` must be int64 or int32, got float32"),
        (IDS.bool(), WEIGHTS, TypeError, "got bool"),
        (IDS, WEIGHTS.long(), TypeError, "`weights_TK` must be floats, got int64"),
        (IDS[:4], WEIGHTS, ValueError, r"`expert_ids_TK` must have shape \(5, K\) .* got \(4, 2\)"),
        (IDS[:, 0], WEIGHTS, ValueError, r"got \(5,\)"),
        (IDS[:, :0], WEIGHTS[:, :0], ValueError, r"K at least 1, .* got \(5, 0\)"),
        (IDS, WEIGHTS[:, :1], ValueError, r"the shape of `expert_ids_TK`, \(5, 2\), got \(5, 1\)"),
        (IDS, WEIGHTS.to("meta"), ValueError, "`weights_TK` must be on the device of `x_TD`"),
        (IDS + 1, WEIGHTS, ValueError, r"in \[0, E=3\), or -1 for no route, got ids from 0 to 3"),
        (IDS - 1, WEIGHTS, ValueError, "got ids from -2 to 1"),
        (IDS.int() + 1, WEIGHTS, ValueError, "got ids from 0 to 3"),
        (
            IDS.clamp(max=1),
            WEIGHTS,
            ValueError,
            "twice in one token, got that in 1 of 5 tokens; add",
        ),
        (IDS.clamp(0, 0), WEIGHTS, ValueError, "an expert twice in one token, got that in 5 of 5"),
    ],
)
def test_moe_mlp_refuses(ids, weights, error, message):
    with pytest.raises(error, match=message):
        moe_mlp(X, ids, weights, GATE_UP, DOWN)


def test_moe_mlp_takes_two_missing_routes_in_one_token():
    assert (IDS[3] == -1).all()
    assert moe_mlp(X, IDS, WEIGHTS, GATE_UP, DOWN).shape == X.shape


def test_moe_mlp_speaks_of_its_own_arguments():
    with pytest.raises(ValueError, match=r"`x_TD` must .*; flatten batch and sequence into"):
        moe_mlp(X[None], IDS, WEIGHTS, GATE_UP, DOWN)
    with pytest.raises(ValueError, match=r"`x_TD` must have 2 dimensions, got shape \(8,\)\.$"):
        moe_mlp(X[0], IDS, WEIGHTS, GATE_UP, DOWN)
    with pytest.raises(ValueError, match=r"for `x_TD` of shape \(5, 8\)"):
        moe_mlp(X, IDS, WEIGHTS, GATE_UP, DOWN.mT)
    with pytest.raises(ValueError, match=re.escape("`impl` must be 'auto'")):
        moe_mlp(X, IDS, WEIGHTS, GATE_UP, DOWN, impl="cuda")


@pytest.mark.parametrize("name", ["num_experts", "d_model", "d_hidden"])
def test_experts_refuse_empty_sizes(name):
    sizes = {"num_experts": 3, "d_model": 8, "d_hidden": 4, name: 0}
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        Experts(**sizes)


@pytest.mark.parametrize("name", ["num_experts", "d_model", "d_hidden"])
@pytest.mark.parametrize("size", [4.0, "4", None])
def test_experts_refuse_sizes_that_are_no_integers(name, size):
    sizes = {"num_experts": 3, "d_model": 8, "d_hidden": 4, name: size}
    with pytest.raises(TypeError, match=f"`{name}` must be an integer, got {size!r}"):
        Experts(**sizes)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.float8_e4m3fn])
def test_experts_refuse_a_dtype_that_nothing_multiplies(dtype):
    with pytest.raises(TypeError, match=f"`dtype` must be .* or float64, got {str(dtype)[6:]}"):
        Experts(3, 8, 4, dtype=dtype)


@pytest.mark.parametrize("options", [{}, {"matmul": grouped_mm}])
def test_experts_refuse_an_unknown_product(options):
    with pytest.raises(ValueError, match=r"`impl` must be 'auto', .* got 'cuda'"):
        Experts(3, 8, 4, impl="cuda", **options)


def test_experts_refuse_an_unknown_activation():
    with pytest.raises(ValueError, match=r"`activation` must be one of 'swiglu', .* got 'relu'"):
        Experts(3, 8, 4, activation="relu")


def test_experts_refuse_two_products():
    with pytest.raises(ValueError, match="got impl='reference'; pass one of them"):
        Experts(3, 8, 4, impl="reference", matmul=grouped_mm)
