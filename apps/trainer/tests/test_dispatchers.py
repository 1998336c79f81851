"""Which dispatcher a layout gets, and what is said when it cannot be had."""

import io
import sys
import types

import pytest
import torch
from olmo_ep_comm import LocalDispatcher, rowwise_buffer_bytes
from olmo_experts_gemm import Experts
from olmo_mxfp8 import MXExperts, MXLinear
from olmo_routing import admit
from olmo_trainer import dispatcher as dispatcher_module
from olmo_trainer import loop
from olmo_trainer.config import TrainerConfig
from olmo_trainer.describe import print_config
from olmo_trainer.dispatcher import build_dispatcher, check_installed, live_dispatches
from olmo_trainer.mesh import Mesh
from olmo_trainer.overrides import ConfigError, apply_overrides
from olmo_trainer.pipeline_schedule import (
    build_schedule,
    leave_weight_gradients,
    split_rules,
)
from olmo_trainer.recipes import nano
from rich.console import Console
from torch import nn

WIDE = ("model.d_model=256", "layout.expert=2", "layout.dispatcher.kind=deepep")


def _config(*settings: str, world: int = 2) -> TrainerConfig:
    return apply_overrides(nano(), settings).for_world(world)


def _mesh(config: TrainerConfig) -> Mesh:
    return Mesh(
        rank=0,
        world=2,
        data=0,
        num_data=config.layout.data or 1,
        context=0,
        num_context=config.layout.context,
        expert=0,
        num_expert=config.layout.expert,
        pipeline=0,
        device=torch.device("cpu"),
    )


def test_what_a_layout_names_is_what_it_gets(monkeypatch):
    made = []

    def create(kind, **options):
        made.append((kind, options))

    monkeypatch.setattr(dispatcher_module, "create_dispatcher", create)
    for settings, kind in (
        ((), "local"),
        (("layout.expert=2",), "all_to_all"),
        (("layout.dispatcher.kind=local",), "local"),
        (("layout.dispatcher.kind=all_to_all",), "all_to_all"),
        (
            (
                *("layout.expert=2", "layout.dispatcher.kind=rowwise", "batch.accumulation=2"),
                "layout.dispatcher.timeout_s=7",
            ),
            "rowwise",
        ),
        ((*WIDE, "layout.dispatcher.gpu_timeout_s=9"), "deepep"),
    ):
        config = _config(*settings)
        build_dispatcher(config, _mesh(config), dtype=torch.bfloat16, live_forwards=5)
        assert made[-1][0] == kind
        assert made[-1][1]["num_experts"] == 4
    rowwise, deepep = made[-2][1], made[-1][1]
    # Eight sequences of 64 for two data ranks of two microbatches.
    sizes = {"max_tokens": 2 * 64, "width": 32, "top_k": 2}
    assert sizes.items() <= rowwise.items()
    assert rowwise["dtype"] == torch.bfloat16
    assert (rowwise["live_forwards"], rowwise["timeout_s"]) == (5, 7)
    assert "capacity" not in rowwise
    assert (deepep["max_tokens"], deepep["width"]) == (4 * 64, 256)
    assert (deepep["cpu_timeout_s"], deepep["gpu_timeout_s"]) == (300, 9)


def test_buffers_are_of_the_positions_of_a_context_rank(monkeypatch):
    made = {}
    monkeypatch.setattr(
        dispatcher_module, "create_dispatcher", lambda kind, **options: made.update(options)
    )
    config = _config("layout.context=2", "layout.expert=2", "layout.dispatcher.kind=rowwise")
    build_dispatcher(config, _mesh(config), dtype=torch.float32, live_forwards=1)
    assert made["max_tokens"] == 8 * 64 // 2


@pytest.mark.parametrize("policy", ["fair", "tail"])
def test_a_capacity_is_times_the_even_load(monkeypatch, policy):
    made = {}
    monkeypatch.setattr(
        dispatcher_module, "create_dispatcher", lambda kind, **options: made.update(options)
    )
    factor = ("layout.dispatcher.capacity_factor=1.3", f"layout.dispatcher.drop={policy}")
    config = _config("layout.expert=2", "layout.dispatcher.kind=rowwise", *factor)
    build_dispatcher(config, _mesh(config), dtype=torch.float32, live_forwards=1)
    assert made["capacity"] == 666  # 1.3 * 256 tokens * 2 experts a token, rounded up
    requested = torch.tensor([[[6, 3]], [[0, 3]]])  # two sources, one destination, two experts
    assert torch.equal(made["admit"](requested, 6), admit(requested, 6, policy=policy))
    assert made["admit"](requested, 6)[0, 0, 0] == {"fair": 3, "tail": 6}[policy]


@pytest.mark.parametrize("factor", [None, "1.3", "9"])
@pytest.mark.parametrize("word", ["bf16", "fp32"])
def test_a_dry_run_prints_the_buffers_that_are_allocated(monkeypatch, factor, word):
    """The formula beside the options that the dispatcher itself would be made with."""
    made = []
    monkeypatch.setattr(
        dispatcher_module,
        "create_dispatcher",
        lambda kind, *, num_experts, group, timeout_s, admit=None, **options: made.append(
            rowwise_buffer_bytes(num_ranks=2, num_experts=num_experts, **options)
        ),
    )
    settings = ["layout.expert=2", "layout.dispatcher.kind=rowwise", f"precision.parameters={word}"]
    if factor is not None:
        settings.append(f"layout.dispatcher.capacity_factor={factor}")
    config = _config(*settings)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[word]
    live = live_dispatches(config, build_schedule(config.layout, config.batch.accumulation), 0)
    build_dispatcher(config, _mesh(config), dtype=dtype, live_forwards=live)
    text = io.StringIO()
    print_config(config, Console(file=text))
    (want,) = made
    (line,) = [one for one in text.getvalue().splitlines() if one.startswith("buffers ")]
    assert f" {sum(want.values()):,} bytes more with {word} rows" in line
    rows = {size for name, size in want.items() if name.startswith("rows ")}
    assert f": rows {live} x {rows.pop():,}, " in line
    assert not rows
    assert all(f"{name} {size:,}" in line for name, size in want.items() if name[:5] != "rows ")


def test_other_dispatchers_have_no_buffers_to_print():
    text = io.StringIO()
    print_config(_config("layout.expert=2"), Console(file=text))
    assert "buffers " not in text.getvalue()


def test_one_process_keeps_its_experts():
    config = _config(world=1)
    made = build_dispatcher(config, _mesh(config), dtype=torch.float32, live_forwards=1)
    assert isinstance(made, LocalDispatcher)


def test_live_dispatches_follow_the_schedule():
    def live(*settings: str, rank: int = 0) -> int:
        config = _config("layout.pipeline=2", "batch.accumulation=8", *settings)
        return live_dispatches(config, build_schedule(config.layout, 8), rank)

    # Layer 0 is dense: rank 0 holds one routed layer, rank 1 two; 1F1B keeps 2 and 1 alive.
    assert live() == 2
    assert live(rank=1) == 2
    assert live("layout.schedule.kind=gpipe") == 8
    assert live("model.num_dense_layers=4") == 1


@pytest.mark.parametrize(("kind", "wait"), [("auto", True), ("rowwise", False)])
def test_rows_in_a_buffer_that_is_written_again_are_not_left_for_later(kind, wait):
    config = _config("layout.expert=2", f"layout.dispatcher.kind={kind}")
    part = nn.ModuleList([Experts(1, 8, 8), MXExperts(1, 32, 32), MXLinear(32, 32)])
    leave_weight_gradients(part, lambda weights: None, config)
    assert [layer.defer is not None for layer in part] == [wait, wait, True]
    whole = split_rules(config)
    assert not any(whole.values())
    assert (torch.ops.olmo_experts_gemm.expert_mlp.default in whole) != wait


def test_a_library_that_is_missing_is_named_before_anything_starts(make_config, monkeypatch):
    assert check_installed(_config()) is None
    config = _config(*WIDE)
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    monkeypatch.setattr(dispatcher_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'deepep' needs DeepEP v2 .* use 'all_to_all' or 'rowwi"):
        loop.train(config, resume=None, console=Console(file=io.StringIO()))


def test_what_a_library_says_is_passed_on(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("NCCL is too old")

    monkeypatch.setattr(dispatcher_module, "create_dispatcher", refuse)
    config = _config(*WIDE)
    with pytest.raises(ValueError, match="'deepep': NCCL is too old"):
        build_dispatcher(config, _mesh(config), dtype=torch.bfloat16, live_forwards=1)


def test_an_assembly_closes_what_must_be_closed(make_config, monkeypatch):
    from olmo_trainer.build import assemble
    from olmo_trainer.mesh import create_mesh

    config = make_config()
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    assembly.close()  # nothing to close
    closed = []
    stand_in = types.SimpleNamespace(close=lambda: closed.append(True))
    object.__setattr__(assembly, "dispatcher", stand_in)
    assembly.close()
    assert closed == [True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["layout.dispatcher=rowwise"],
            "layout.dispatcher is a group; set one of its values: ki",
        ),
        (["layout.dispatcher.kind=x"], "layout.dispatcher.kind = 'x': must be one of 'auto', 'loc"),
        (["layout.dispatcher.kind=rowwise"], "dispatcher 'rowwise' needs expert >= 2, got"),
        (["layout.expert=2", "layout.dispatcher.kind=local"], "'local' needs expert = 1, got"),
        (
            ["layout.expert=2", "layout.dispatcher.kind=deepep"],
            r"'deepep' needs model.d_model \(32\) a multiple of 256",
        ),
        ([*WIDE, "precision.parameters=fp32"], "'deepep' moves BF16 between GPUs, got .* 'fp32'"),
        (
            ["layout.expert=2", "layout.dispatcher.kind=rowwise", "layout.dispatcher.drop=tail"],
            "'tail' needs a capacity_factor; without one nothing is dropped",
        ),
        (["layout.dispatcher.timeout_s=3"], "layout.dispatcher.timeout_s: no such key for kind ="),
    ],
)
def test_a_wrong_dispatcher_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(nano(), settings)
