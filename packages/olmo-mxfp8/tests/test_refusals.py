"""What is no tensor, no `MXTensor`, no recipe, no cache or no choice is refused by its name."""

import numpy as np
import olmo_mxfp8 as mx
import pytest
import torch

ROWS, WEIGHT = torch.zeros(4, 64), torch.zeros(32, 64)
EXPERTS, UP, DOWN = torch.zeros(2, 32, 64), torch.zeros(2, 64, 64), torch.zeros(2, 64, 32)
ENDS = torch.tensor([2, 4], dtype=torch.int32)
T, SCALES = mx.quantize(ROWS), mx.quantize(ROWS).scales

TAKES_TENSORS = {
    "quantize": (mx.quantize, {"x": ROWS}),
    "quantize_both": (mx.quantize_both, {"x_MK": WEIGHT}),
    "quantize_with_transpose": (mx.quantize_with_transpose, {"w": WEIGHT}),
    "swiglu_quantize": (mx.swiglu_quantize, {"hidden_R2H": ROWS, "row_weights_R": ROWS[:, 0]}),
    "weighted_quantize": (mx.weighted_quantize, {"x_RD": ROWS, "row_weights_R": ROWS[:, 0]}),
    "swiglu_quantize_backward": (
        mx.swiglu_quantize_backward,
        {"d_act_RH": ROWS[:, :32], "hidden_R2H": ROWS, "row_weights_R": ROWS[:, 0]},
    ),
    "mx_linear": (mx.mx_linear, {"x": ROWS, "w": WEIGHT}),
    "mx_grouped_mm": (mx.mx_grouped_mm, {"x_RD": ROWS, "w_EFD": EXPERTS, "offsets_E": ENDS}),
    "mx_swiglu_experts": (
        mx.mx_swiglu_experts,
        {
            "x_RD": ROWS,
            "w_gate_up_E2HD": UP,
            "w_down_EDH": DOWN,
            "offsets_E": ENDS,
            "row_weights_R": ROWS[:, 0],
        },
    ),
    "WeightCache": (mx.WeightCache, {"weight": WEIGHT}),
    "swizzle_scales": (mx.swizzle_scales, {"scales": SCALES, "offsets_E": ENDS}),
    "unswizzle_scales": (
        lambda swizzled, offsets_E: mx.unswizzle_scales(swizzled, 4, 2, offsets_E),
        {"swizzled": mx.swizzle_scales(SCALES, ENDS), "offsets_E": ENDS},
    ),
    "MXTensor": (
        lambda data, scales: mx.MXTensor(data, scales, 1, "e4m3"),
        {"data": T.data, "scales": SCALES},
    ),
}
TAKES_QUANTISED = {
    "dequantize": (mx.dequantize, {"t": T}),
    "dequantize_rows": (lambda t: mx.dequantize_rows(t, ENDS - 1), {"t": T}),
    "scaled_mm": (mx.scaled_mm, {"a": T, "b": mx.quantize(WEIGHT)}),
    "scaled_grouped_mm": (
        lambda a, b: mx.scaled_grouped_mm(a, b, ENDS),
        {"a": T, "b": mx.quantize(EXPERTS)},
    ),
}
TAKES_RECIPES = {
    "mx_linear": lambda recipe: mx.mx_linear(ROWS, WEIGHT, recipe=recipe),
    "mx_grouped_mm": lambda recipe: mx.mx_grouped_mm(ROWS, EXPERTS, ENDS, recipe=recipe),
    "mx_swiglu_experts": lambda recipe: mx.mx_swiglu_experts(ROWS, UP, DOWN, ENDS, recipe=recipe),
    "WeightCache": lambda recipe: mx.WeightCache(WEIGHT, recipe=recipe),
    "MXLinear": lambda recipe: mx.MXLinear(32, 32, recipe=recipe),
    "from_linear": lambda recipe: mx.MXLinear.from_linear(torch.nn.Linear(32, 32), recipe),
    "MXExperts": lambda recipe: mx.MXExperts(2, 32, 32, recipe=recipe),
}


def arguments(table):
    return [pytest.param(*table[f], name, id=f"{f}-{name}") for f in table for name in table[f][1]]


@pytest.mark.parametrize(("function", "given", "name"), arguments(TAKES_TENSORS))
def test_what_is_no_tensor(function, given, name):
    function(**given)
    for value, how in ((given[name].tolist(), "as_tensor"), (T, "`dequantize` gives its values")):
        with pytest.raises(TypeError, match=rf"`{name}` must be a torch.Tensor, got .*{how}"):
            function(**{**given, name: value})
    array = np.zeros(given[name].shape, dtype=np.float32)
    with pytest.raises(TypeError, match=rf"`{name}` must be a torch.Tensor, got ndarray"):
        function(**{**given, name: array})


@pytest.mark.parametrize(("function", "given", "name"), arguments(TAKES_QUANTISED))
def test_what_is_not_quantised(function, given, name):
    function(**given)
    with pytest.raises(TypeError, match=f"`{name}` must be an MXTensor, got Tensor; `quantize`"):
        function(**{**given, name: torch.zeros(given[name].shape)})


@pytest.mark.parametrize("rows", [[1, 2], np.array([1, 2])])
def test_rows_that_are_no_tensor(rows):
    with pytest.raises(TypeError, match=r"`rows_R` must be a torch.Tensor, got"):
        mx.dequantize_rows(T, rows)


@pytest.mark.parametrize("function", TAKES_RECIPES.values(), ids=TAKES_RECIPES)
@pytest.mark.parametrize("recipe", ["mxfp8", None, {}])
def test_what_is_no_recipe(function, recipe):
    function(mx.MXRecipe())
    with pytest.raises(TypeError, match="`recipe` must be an MXRecipe, got"):
        function(recipe)


def test_what_is_no_cache():
    for call in (
        lambda: mx.mx_linear(ROWS, WEIGHT, cache=T),
        lambda: mx.mx_grouped_mm(ROWS, EXPERTS, ENDS, cache=T),
        lambda: mx.mx_swiglu_experts(ROWS, UP, DOWN, ENDS, caches=(None, None)),
    ):
        with pytest.raises(TypeError, match=r"must be a WeightCache, got .*`WeightCache"):
            call()
    one = mx.WeightCache(UP)
    for caches in (one, (one,), (one, one, one)):
        with pytest.raises(TypeError, match="`caches` must be a pair of `WeightCache`"):
            mx.mx_swiglu_experts(ROWS, UP, DOWN, ENDS, caches=caches)


@pytest.mark.parametrize("value", [128.0, np.int64(128), torch.tensor(128), [128], None])
def test_granularities_are_numbers_of_python(value):
    """A number of another type is no size to torch, and would fail far from here."""
    for call in (
        lambda: mx.MXRecipe(granularity=value),
        lambda: mx.MXPacker(granularity=value),
        lambda: mx.quantize(torch.zeros(1, 128), granularity=value),
        lambda: mx.swiglu_quantize(torch.zeros(1, 256), granularity=value),
        lambda: mx.weighted_quantize(torch.zeros(1, 256), torch.zeros(1), granularity=value),
    ):
        with pytest.raises(ValueError, match="`granularity` must be 32"):
            call()


@pytest.mark.parametrize("value", [["e4m3"], {}, None, torch.float8_e4m3fn])
def test_elements_are_words(value):
    for call in (
        lambda: mx.MXRecipe(element=value),
        lambda: mx.MXPacker(element=value),
        lambda: mx.quantize(ROWS, element=value),
        lambda: mx.MXTensor(T.data, SCALES, 1, value),
    ):
        with pytest.raises(ValueError, match="`element` must be 'e4m3' or 'e5m2', got"):
            call()


@pytest.mark.parametrize("dim", [1.0, None, "1"])
def test_dimensions_are_integers(dim):
    for call in (
        lambda: mx.quantize(ROWS, dim=dim),
        lambda: mx.MXTensor(T.data, SCALES, dim, "e4m3"),
    ):
        with pytest.raises(TypeError, match="`dim` must be an int, got"):
            call()


DENSE = {"COO": torch.Tensor.to_sparse, "CSR": torch.Tensor.to_sparse_csr}
DENSE |= {"CSC": torch.Tensor.to_sparse_csc, "oneDNN": torch.Tensor.to_mkldnn}
DENSE |= {"BSR": lambda x: x.to_sparse_bsr((4, 4)), "BSC": lambda x: x.to_sparse_bsc((4, 4))}
SOURCES = {
    "x": mx.quantize,
    "x_MK": mx.quantize_both,
    "w": mx.quantize_with_transpose,
    "x_RD": lambda x: mx.weighted_quantize(x, torch.ones(32)),
    "hidden_R2H": mx.swiglu_quantize,
    "tensor": mx.MXPacker().pack,
    "weight": mx.WeightCache,
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", DENSE.values(), ids=DENSE)
@pytest.mark.parametrize(("name", "function"), SOURCES.items(), ids=SOURCES)
def test_tensors_that_are_not_dense(name, function, layout):
    given = layout(torch.eye(32))
    message = rf"`{name}` must be dense, got layout {given.layout}; call `.to_dense\(\)`"
    with pytest.raises(TypeError, match=message):
        function(given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize(("name", "function"), SOURCES.items(), ids=SOURCES)
def test_nested_tensors(name, function, layout):
    nested = torch.nested.nested_tensor([ROWS, WEIGHT], layout=layout)
    with pytest.raises(TypeError, match=rf"`{name}` must be dense, got a nested tensor; call `.to"):
        function(nested)


def test_scalars():
    with pytest.raises(ValueError, match="`x` must have at least one dimension, got a scalar"):
        mx.quantize(torch.tensor(1.0))


def test_codes_and_scales_on_two_devices():
    with pytest.raises(ValueError, match="`scales` must be on the device of `data`, cpu, got meta"):
        mx.MXTensor(T.data, SCALES.to("meta"), 1, "e4m3")


@pytest.mark.parametrize("cached", [False, True])
def test_parameters_that_cannot_be_quantised(cached):
    message = "`dtype` must be float32, bfloat16 or float16, got torch.float64"
    for call in (
        lambda: mx.MXLinear(32, 32, dtype=torch.float64, cached=cached),
        lambda: mx.MXLinear.from_linear(torch.nn.Linear(32, 32).double(), cached=cached),
        lambda: mx.MXExperts(2, 32, 32, dtype=torch.float64, cached=cached),
    ):
        with pytest.raises(TypeError, match=message):
            call()
