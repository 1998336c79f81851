"""The kernels in Triton's interpreter, one process for all, and the width of their addresses."""

import ast
from pathlib import Path

import olmo_experts_gemm
import pytest
from triton_interpreter import Interpreter

KERNELS = sorted((Path(olmo_experts_gemm.__file__).parent / "_triton").glob("*.py"))


def test_the_kernels_in_the_interpreter(interpreter: Interpreter) -> None:
    assert interpreter.skipped("interpreted_rows.py", "interpreted_products.py") == []


# A tile's number times a size of a tile is an index within one dimension, which has 31 bits; a row
# times a width is an index within a tensor, which has 64.
TILE_SIZES = {"BM", "BN", "BK", "WIDTH", "BLOCK", "BLOCKS", "EXPERTS", "ROWS", "COLUMNS"}


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_addresses_are_computed_in_64_bits(file: Path) -> None:
    narrow = narrow_products(file.read_text())
    assert not narrow, f"int32 products in addresses: {narrow}; use `.to(tl.int64)`"


@pytest.mark.parametrize(
    "body",
    [
        "tl.load(x + row[:, None] * D + tl.arange(0, BM)[None, :])",
        "at = row * D\n    at_column = x + at + 3\n    tl.store(at_column, 0)",
        "at = x\n    at += row * D\n    tl.load(at)",
        "i, at = 0, (row * D).to(tl.int64)\n    tl.load(x + at)",
        "tl.load(x + tl.where(row < 3, row * D, 0))",
        "tl.load(x + row // 8 * D)",
    ],
)
def test_a_narrow_address_is_found(body: str) -> None:
    source = f"@triton.jit\ndef _kernel(x, row, D):\n    {body}\n"
    (product,) = narrow_products(source)
    assert product.endswith("* D")


@pytest.mark.parametrize(
    "body",
    [
        "tl.load(x + row.to(tl.int64)[:, None] * D)",
        "wide = row.to(tl.int64)\n    tl.load(x + 2 * wide * D)",
        "tl.load(x + row * BM + tl.arange(0, BM))",
        "tl.load(x + row // 8 * 8)",
        "tl.load(x + row, mask=row * D < 7)",
    ],
)
def test_a_wide_address_passes(body: str) -> None:
    assert not narrow_products(f"@triton.jit\ndef _kernel(x, row, D):\n    {body}\n")


def narrow_products(source: str) -> list[str]:
    """The products in what a kernel loads from or stores to whose factors are int32."""
    tree = ast.parse(source)
    kernels = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and _is_kernel(n)]
    # A helper takes a wide index under the name that its caller gave it.
    wide = {
        name
        for kernel in kernels
        for name, values in _values(kernel).items()
        if all(".to(tl.int64)" in ast.unparse(value) for value in values)
    }
    return [product for kernel in kernels for product in _narrow_products(kernel, wide)]


def _is_kernel(function: ast.FunctionDef) -> bool:
    return "triton.jit" in map(ast.unparse, function.decorator_list)


def _values(kernel: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """All that each name of a kernel is ever set to."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(kernel):
        if isinstance(node, ast.AugAssign):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = node.targets[0].elts
            each = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            pairs = list(zip(names, each if len(each) > 1 else each * len(names), strict=True))
        elif isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
        else:
            continue
        for name, value in pairs:
            values.setdefault(ast.unparse(name), []).append(value)
    return values


def _narrow_products(kernel: ast.FunctionDef, wide: set[str]) -> list[str]:
    values = _values(kernel)
    accesses = [n for n in ast.walk(kernel) if isinstance(n, ast.Call) and _is_access(n)]
    pending, seen, narrow = [access.args[0] for access in accesses], set(), []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            pending += values.get(node.id, [])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            factors = (node.left, node.right)
            if not _is_rounding(*factors) and not any(
                _is_wide(f, wide) or _is_tile_size(f) for f in factors
            ):
                narrow.append(ast.unparse(node))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod):
            pending.append(node.left)  # a divisor only makes an index smaller
        elif not (isinstance(node, ast.Call) and _is_access(node)):  # what it loads is no address
            pending += ast.iter_child_nodes(node)
    return narrow


def _is_access(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("tl.load", "tl.store")


def _is_wide(factor: ast.expr, wide: set[str]) -> bool:
    names = {node.id for node in ast.walk(factor) if isinstance(node, ast.Name)}
    return ".to(tl.int64)" in ast.unparse(factor) or bool(names & wide)


def _is_rounding(left: ast.expr, right: ast.expr) -> bool:
    """`a // n * n` is no larger than `a`."""
    divides = isinstance(left, ast.BinOp) and isinstance(left.op, ast.FloorDiv)
    return divides and ast.unparse(left.right) == ast.unparse(right)


def _is_tile_size(factor: ast.expr) -> bool:
    names = {node.id for node in ast.walk(factor) if isinstance(node, ast.Name)}
    return bool(names) and bool(names & TILE_SIZES)
