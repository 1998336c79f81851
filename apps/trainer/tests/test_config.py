import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from olmo_trainer.config import TrainerConfig
from olmo_trainer.describe import print_config
from olmo_trainer.overrides import ConfigError, apply_overrides
from olmo_trainer.recipes import RECIPES, nano, toy
from pydantic import BaseModel
from rich.console import Console


def test_every_recipe_is_valid_and_named_by_its_key():
    for name, recipe in RECIPES.items():
        config = recipe()
        assert config.name == name
        assert apply_overrides(config, []) == config
        world = config.layout.pipeline * config.layout.expert  # the fewest processes
        assert config.for_world(world).layout.data == config.layout.expert


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("batch.sequences=x", "batch.sequences = 'x': input should be a valid integer"),
        ("batch.sequences=0", "batch.sequences = 0: input should be greater than or equal to 1"),
        ("batch.sequnces=1", r"batch.sequnces: no such key; did you mean batch.sequences\?"),
        ("d_model=64", r"d_model: no such key; did you mean model.d_model"),
        ("model=3", "model is a group; set one of its values: vocab_size"),
        (
            "optimizer.lr=1",
            "optimizer.lr: no such key for kind = .adamw.; optimizer has kind, learning_rate, ",
        ),
        ("nothing", "--set needs KEY=VALUE, got 'nothing'"),
        ("model.d_model=30", "model.d_model = 30: input should be a multiple of 8"),
        ("model.moe.top_k=9", r"top_k \(9\) must be at most num_experts \(4\)"),
        ("model.attention.num_heads=3", None),
        ("model.attention.num_kv_heads=3", r"num_kv_heads \(3\) must divide num_heads \(2\)"),
        ("model.attention.full_every=2", r"full_every \(2\) needs a window"),
        ("model.attention.window=-1", "greater than or equal to 0"),
        ("model.attention.qk_norm=none", "input should be 'head' or 'projection'"),
        ("model.norms=post", "model.norms = 'post': input should be 'peri' or 'pre'"),
        ("model.moe.route_weights=one", "should be 'mean_one', 'sum_one' or 'scores'"),
        ("layout.expert=3", r"layout.expert \(3\) must divide model.moe.num_experts \(4\)"),
        ("layout.context=3", r"layout.context \(3\) must divide data.sequence_length \(64\)"),
        ("layout.context=4", r"context \(4\) must divide model.attention.num_heads \(2\)"),
        ("layout.pipeline=5", r"model.num_layers \(4\) must be at least .* \(5\)"),
        ("layout.schedule.kind=interleaved", "needs pipeline >= 2, got pipeline = 1"),
        (
            "data.source.kind=web",
            "data.source.kind = 'web': must be one of 'standard_library', 'text_folder'",
        ),
        ("data.source.kind=text_folder", "data.source.path: required, not given"),
        (
            "data.source.path=/tmp",
            "path: no such key for kind = 'standard_library'; set data.source.kind = 'text_folder'",
        ),
        ("recompute=blocks", r"recompute is a group; .* did you mean recompute.kind\?$"),
        ("guard.limit=5", "no such key for kind = 'stop'; set guard.kind = 'skip' for it$"),
        ("guard.zzz=5", "no such key for kind = 'stop'; guard has kind$"),
        ("schedule.decay=linear", "for kind = 'cosine'; set schedule.kind = 'wsd' for it$"),
        (
            "layout.schedule.chunks=3",
            "for kind = 'one_f_one_b'; set layout.schedule.kind = 'interleaved' for it$",
        ),
        (
            "schedule.decay_steps=9",
            "no such key for kind = 'cosine'; schedule has kind, warmup_steps, final_fraction$",
        ),
        ("data.source.kind=token_files", "data.source.paths: required, not given"),
        ("data.max_passes=0", "data.max_passes = 0: input should be greater than 0"),
        ("data.attend=page", "data.attend = 'page': input should be 'sequence' or 'document'"),
        ("data.filter.kind=x", "data.filter.kind = 'x': must be one of 'none', 'repeats'"),
        ("data.filter.max_count=9", "data.filter.max_count: no such key for kind = 'none'"),
        (
            "precision.mxfp8=heads",
            "precision.mxfp8.0 = 'heads': input should be 'experts', 'shared'",
        ),
        ("precision.mxfp8=experts,experts", "must name each once, got 'experts' twice"),
        ('precision.mxfp8=["shared", "shared"]', "precision.mxfp8 = .*: must name each once, got"),
        ("device=tpu", "device = 'tpu': input should be 'auto', 'cpu' or 'cuda'"),
        ("optimizer.beta1=1", "optimizer.beta1 = 1: input should be less than 1"),
        ("optimizer.learning_rate=Infinity", "learning_rate = inf: input should be a finite"),
        ("optimizer.learning_rate=true", "learning_rate = true: must not be true or false"),
        ("model.moe.z_loss=NaN", "model.moe.z_loss = nan: input should be a finite number"),
        ("seed=9223372036854775808", "seed = 9223372036854775808: input should be less than"),
        ("name=..", r"name = '\.\.': string should match pattern"),
        ("run.folder=", "run.folder = '': string should have at least 1 character"),
        ("steps=null", "steps = None: input should be a valid integer"),
    ],
)
def test_a_wrong_setting_names_key_value_and_rule(setting, message):
    if message is None:
        assert apply_overrides(nano(), [setting]).model.attention.num_heads == 3
        return
    with pytest.raises(ConfigError, match=message):
        apply_overrides(nano(), [setting])


def test_key_value_heads_and_context_ranks_divide_one_another():
    heads = ["model.attention.num_heads=12", "layout.context=4"]
    for num_kv_heads in (1, 2, 4, 12):
        settings = [*heads, f"model.attention.num_kv_heads={num_kv_heads}"]
        config = apply_overrides(nano(), settings).for_world(8)
        assert (config.layout.data, config.layout.context) == (2, 4)
    with pytest.raises(ConfigError, match=r"num_kv_heads \(6\) or be a multiple of it"):
        apply_overrides(nano(), [*heads, "model.attention.num_kv_heads=6"])


def test_mxfp8_widths():
    with pytest.raises(ConfigError, match=r"expert_hidden \(40\) must be a multiple of 32"):
        apply_overrides(nano(), ["precision.mxfp8=experts", "model.moe.expert_hidden=40"])
    ok = apply_overrides(nano(), ["precision.mxfp8=shared", "model.moe.expert_hidden=40"])
    assert ok.precision.mxfp8 == ("shared",)


def test_a_switched_strategy_starts_from_its_own_defaults():
    config = apply_overrides(nano(), ["data.source.path=/x", "data.source.kind=text_folder"])
    assert config.data.source.kind == "text_folder"
    assert config.data.source.pattern == "*.txt"
    assert config.data.sequence_length == 64  # the recipe's: it belongs to no source
    back = apply_overrides(config, ["data.source.kind=standard_library"])
    assert back.data == nano().data


@pytest.mark.parametrize(
    ("settings", "world", "message"),
    [
        ([], 0, None),
        (["layout.pipeline=2"], 3, r"layout.pipeline \(2\) must divide .* \(3\)"),
        (["layout.data=3"], 4, r"layout.data \(3\) \* .* must be .* \(4\)"),
        (["layout.expert=4"], 2, r"\(4\) must divide .* \(2 \* 1\); .*expert=1$"),
        (["layout.context=2"], 3, r"layout.context \(2\) must divide .* world / pipeline \(3\)"),
        (["layout.context=2", "layout.expert=4"], 2, r"data \* context \(1 \* 2\)"),
        (["layout.context=2", "layout.data=2"], 2, r"\(2\) \* layout.context \(2\) \* .* \(2\)"),
        (
            ["batch.sequences=8"],
            3,
            r"batch.sequences \(8\) must be .* \(3 \* 1\); as .*sequences=9$",
        ),
        (["layout.dispatcher.kind=all_to_all"], 1, "'all_to_all' needs more than one process"),
        (["batch.accumulation=3"], 1, r"batch.sequences \(8\) .* \(1 \* 3\)"),
    ],
)
def test_a_layout_that_does_not_divide_is_named(settings, world, message):
    config = apply_overrides(nano(), settings)
    if message is None:
        assert config.for_world(1).layout.data == 1
        return
    with pytest.raises(ValueError, match=message):
        config.for_world(world)


def test_layout_fits_the_world():
    config = apply_overrides(toy(), ["layout.pipeline=2", "layout.expert=2"]).for_world(4)
    assert config.layout.data == 2
    assert config.layout.num_stages == 2


def test_a_folder_may_be_named_by_a_number():
    assert apply_overrides(nano(), ["run.folder=2024"]).run.folder == "2024"


def test_which_layers_slide():
    settings = ["model.attention.window=8", "model.attention.full_every=4"]
    attention = apply_overrides(nano(), settings).model.attention
    assert [attention.window_of(layer) for layer in range(8)] == [8, 8, 8, 0, 8, 8, 8, 0]
    with pytest.raises(ConfigError, match="full_every = 1 leaves no layer sliding"):
        apply_overrides(nano(), ["model.attention.window=8", "model.attention.full_every=1"])


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("{}", "data.source.sources: Dictionary should have at least 1 item"),
        ('{"a": {}}', "data.source.sources.a.source: required, not given"),
        (
            '{"a": {"source": {"kind": "token_files", "paths": []}}}',
            "data.source.sources.a.source.paths = .*at least 1 item",
        ),
        (
            '{"a": {"source": {"kind": "standard_library"}, "weight": 0}}',
            "data.source.sources.a.weight = 0: input should be greater than 0",
        ),
        (
            '{"a": {"source": {"kind": "mixture"}}}',
            "data.source.sources.a.source.kind = 'mixture': must be one of 'standard_library'",
        ),
    ],
)
def test_a_wrong_source_of_a_mixture_is_named(sources, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(nano(), ["data.source.kind=mixture", f"data.source.sources={sources}"])


def test_paths_may_be_words_or_a_list():
    for paths in ("a,b*.npy", '["a", "b*.npy"]'):
        config = apply_overrides(
            nano(), ["data.source.kind=token_files", f"data.source.paths={paths}"]
        )
        assert config.data.source.paths == ("a", "b*.npy")
        assert apply_overrides(config, []) == config
    source = '{"a": {"source": {"kind": "standard_library"}}}'
    mixed = apply_overrides(nano(), ["data.source.kind=mixture", f"data.source.sources={source}"])
    heavier = apply_overrides(mixed, ["data.source.sources.a.weight=2"])
    assert heavier.data.source.sources["a"].weight == 2


BATCH = ("batch.warmup.kind=linear", "batch.warmup.start=2", "batch.warmup.increment=2")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["schedule.warmup_steps=9"], None),
        (["schedule.warmup_steps=10"], "only rises, to 3.00e-03 of 3.00e-03"),
        (["schedule.warmup_steps=40"], "only rises, to 7.50e-04 of 3.00e-03"),
        ([*BATCH, "batch.warmup.steps=9"], None),
        ([*BATCH, "batch.warmup.steps=10"], "none has the whole batch of 8 sequences"),
    ],
)
def test_a_run_too_short_for_its_warmup_says_so(settings, words, capsys):
    config = apply_overrides(nano(), settings)
    print_config(config, Console(width=1000))
    printed = capsys.readouterr().out
    assert ("leaves none of 10 steps" in printed) == (words is not None)
    assert words is None or words in printed


def _lists(
    model: type[BaseModel], prefix: str = "", chosen: tuple[str, ...] = ()
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the key of each list, and what chooses the strategies that it belongs to."""
    for name, field in model.model_fields.items():
        key, parts = f"{prefix}{name}", (field.annotation, *get_args(field.annotation))
        if any(get_origin(part) is tuple for part in parts):
            yield key, chosen
        if get_origin(field.annotation) is dict:  # of names that a person gives
            continue
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel):
                kind = part.model_fields.get("kind")
                choice = (f"{key}.kind={kind.default}",) if kind else ()
                yield from _lists(part, f"{key}.", chosen + choice)


def test_no_list_takes_a_word_twice():
    words = {
        "precision.mxfp8": "shared",
        "optimizer.decay": "routers",
        "run.trackers": "wandb",
        "recompute.layers": "1",
        "data.source.paths": "a",
    }
    lists = list(_lists(TrainerConfig))
    assert {key for key, _ in lists} == set(words)
    for key, chosen in lists:
        word = words[key]
        apply_overrides(nano(), [*chosen, f"{key}={word}"])
        message = rf"{re.escape(key)} = '{word},{word}': must name each once, got '?{word}'? twice"
        with pytest.raises(ConfigError, match=message):
            apply_overrides(nano(), [*chosen, f"{key}={word},{word}"])


def test_no_name_of_an_object_is_given_twice():
    source = '{"kind": "standard_library"}'
    twice = f'{{"a": {{"source": {source}}}, "a": {{"source": {source}}}}}'
    with pytest.raises(ConfigError, match=r"data.source.sources: must name each once, got 'a' tw"):
        apply_overrides(nano(), ["data.source.kind=mixture", f"data.source.sources={twice}"])


def _words(annotation: object) -> Iterator[str]:
    """Yield every key and every word that a node of the configuration takes."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield name
            yield from _words(field.annotation)
    else:
        for part in get_args(annotation):
            yield from _words(part)


def test_the_readme_names_every_key_and_word():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("\n## The configuration is the interface\n")
    section, _, _ = rest.partition("\n## ")
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", section))))
    known = set(_words(TrainerConfig))
    assert {"dual_pipe_v", "square_root", "top_k", "32"} <= known
    assert sorted(known - named) == []
