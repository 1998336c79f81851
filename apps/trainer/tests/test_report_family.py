"""The report's models: built on the meta device, they have its published counts."""

import itertools

import pytest
import torch
from olmo_ep_comm import create_dispatcher
from olmo_trainer.build import build_part
from olmo_trainer.recipes import RECIPES
from olmo_trainer.report_family import POINTS, POSITIONS, VOCABULARY, Point
from olmo_trainer.sizes import count_flops, count_parameters, stage_layers

# Active and total in billions, to the digits of table 30; FLOP a token in billions, of section 14.
PUBLISHED = {
    "tiny-64e": ("1.59", "12.91", "9.902"),
    "small-64e": ("4.29", "40.86", "29.05"),
    "medium-64e": ("7.37", "70.22", "50.23"),
    "medium-96e": ("7.38", "103.75", "50.25"),
    "medium-128e": ("7.38", "137.27", "50.27"),
    "large-128e": ("15.14", "295.99", "100.19"),
    "ultra-128e": ("58.36", "1200", "371.8"),
    "ultra-256e": ("58.41", "2380", "372.1"),
}
# The same counts to more digits, which tell the norms too.
FINE = {
    "tiny-64e": ("1.5876", "12.912"),
    "small-64e": ("4.2941", "40.863"),
    "medium-64e": ("7.3719", "70.224"),
    "medium-96e": ("7.3756", "103.748"),
    "medium-128e": ("7.3792", "137.273"),
    "large-128e": ("15.1386", "295.989"),
    "ultra-128e": ("58.3588", "1200"),
    "ultra-256e": ("58.4067", "2379.50"),
}
# The 8-layer model whose operations the report states, 18.175 GFLOP a token, is that of 32 experts.
EIGHT_LAYERS = ("capacity-32e", "18.175")


def _digits(count: float, like: str) -> str:
    decimals = len(like.partition(".")[2])
    value = count / 1e9
    # "1.200T" and "2.380T" are rounded to ten billions at most: 1200 and 2380 to the digit given.
    return str(round(value / 10) * 10) if like in ("1200", "2380") else f"{value:.{decimals}f}"


def _built(name: str) -> tuple[int, int]:
    """Count the parameters of the model as it is built: active and total."""
    config = RECIPES[name]()
    moe = config.model.moe
    dispatcher = create_dispatcher("local", num_experts=moe.num_experts)
    with torch.device("meta"):
        part = build_part(config, range(config.model.num_layers), dispatcher, num_expert_ranks=1)
    sizes = {key: parameter.numel() for key, parameter in part.named_parameters()}
    total = sum(sizes.values())
    routed = sum(size for key, size in sizes.items() if ".experts." in key)
    return total - routed + routed // moe.num_experts * moe.top_k, total


@pytest.mark.parametrize("name", PUBLISHED)
def test_built_counts_equal_every_published_digit(name):
    active, total = _built(name)
    for like in (PUBLISHED[name], FINE[name]):
        assert _digits(active, like[0]) == like[0]
        assert _digits(total, like[1]) == like[1]
    counts = count_parameters(RECIPES[name]().model)
    assert (counts.active, counts.total) == (active, total)


def test_operations_a_token_equal_every_published_digit():
    published = {name: digits[2] for name, digits in PUBLISHED.items()}
    for name, digits in [*published.items(), EIGHT_LAYERS]:
        assert _digits(count_flops(POINTS[name].model, POSITIONS), digits) == digits, name
    others = {name for name in POINTS if name.startswith("capacity")} - {EIGHT_LAYERS[0]}
    assert len(others) == 4
    for name in others:
        flops = count_flops(POINTS[name].model, POSITIONS)
        assert _digits(flops, EIGHT_LAYERS[1]) != EIGHT_LAYERS[1]


def _counts(point: Point, tables: int, is_active: int, routers: int, norms: int) -> tuple[int, int]:
    """Count by hand under one reading of the text; `norms` is elements a block."""
    shape = point.shape
    moe_layers = shape.layers - shape.dense_layers
    expert = 3 * shape.width * shape.hidden
    table = VOCABULARY * shape.width
    always = (
        shape.layers * (2 * shape.width * (shape.query + shape.keys) + norms)
        + shape.dense_layers * 5 * expert
        + moe_layers * (expert + routers * shape.width * point.experts)
        + (shape.width if norms else 0)
    )
    active = is_active * table + always + moe_layers * 4 * expert
    return active, tables * table + always + moe_layers * point.experts * expert


def test_only_one_reading_gives_the_published_digits():
    """Of tied or untied, tables active or not, routers counted or not, and where norms stand."""

    def norms(point: Point, blocks: int, heads: str) -> int:
        shape = point.shape
        widths = {"none": 0, "head": 2 * 128, "projection": shape.query + shape.keys}
        return blocks * shape.width + widths[heads]

    readings = itertools.product(
        (1, 2), (0, 1, 2), (0, 1), (0, 2, 4), ("none", "head", "projection")
    )
    fitting = [
        (tables, is_active, routers, blocks, heads)
        for tables, is_active, routers, blocks, heads in readings
        if all(
            (_digits(active, FINE[name][0]), _digits(total, FINE[name][1])) == FINE[name]
            for name in FINE
            for point in [POINTS[name]]
            for active, total in [
                _counts(point, tables, is_active, routers, norms(point, blocks, heads))
            ]
        )
    ]
    assert fitting == [(2, 2, 1, 4, "head")]


def test_capacity_grows_and_the_work_of_a_token_stays():
    counts = [count_parameters(POINTS[f"capacity-{e}e"].model) for e in (8, 16, 32, 64, 128)]
    expert = 7 * 3 * 4096 * 4096
    for smaller, larger in itertools.pairwise(counts):
        added = larger.num_experts - smaller.num_experts
        router = 7 * 4096 * added
        assert larger.total - smaller.total == added * expert + router
        assert larger.active - smaller.active == router


@pytest.mark.parametrize("name", POINTS)
def test_a_layout_of_the_report_cuts_every_model(name):
    """At the fewest processes, two virtual stages a rank, and no layer lost."""
    config = RECIPES[name]()
    layout = config.layout
    fitted = config.for_world(layout.pipeline * layout.expert)
    parts = stage_layers(fitted)
    assert len(parts) == (2 * layout.pipeline if layout.pipeline > 1 else 1)
    assert [layer for part in parts for layer in part] == list(range(config.model.num_layers))
    assert all(parts)


@pytest.mark.parametrize(
    ("name", "mebitokens", "microbatch"),
    [
        ("tiny-64e", 8, 65_536),
        ("small-64e", 24, 24_576),
        ("medium-64e", 16, 16_384),
        ("medium-96e", 24, 16_384),
        ("medium-128e", 24, 16_384),
        ("large-128e", 32, 8_192),
        ("ultra-128e", 64, 8_192),
        ("ultra-256e", 64, 16_384),
    ],
)
def test_batches_are_those_of_the_report(name, mebitokens, microbatch):
    config = RECIPES[name]().for_world(POINTS[name].gpus)
    batch = config.batch
    assert batch.sequences * POSITIONS == mebitokens * 2**20
    assert config.layout.data is not None
    share = batch.sequences // (config.layout.data * batch.accumulation)
    assert share * POSITIONS == microbatch
