"""The report: a page that stands alone, says what the records say, and takes any records."""

import base64
import dataclasses
import io
import math
import random
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from olmo_trainer.metrics import HeldoutRecord, RunHeader, StepRecord
from olmo_trainer.report import history as history_of
from olmo_trainer.report import pictures, write_report
from PIL import Image

SVG = "{http://www.w3.org/2000/svg}"
CONFIG = {"name": "toy", "model": {"d_model": 128, "moe": {"experts": 4, "gate": "<soft&max>"}}}
SUMMARY = {
    "heldout_loss": 1.8344,
    "bits_per_byte": 2.6464,
    "tokens_per_second": 22700.0,
    "parameters_total": 2_113_280,
    "parameters_active": 1_220_000,
    "steps": 1600,
    "tokens": 2_457_600,
    "seconds": 3725.4,
    "hardware": {"device": "CPU, 2 cores"},
    "versions": {"torch": "2.11.0"},
}
SAMPLE = 'if a < b && c:\n\treturn "</pre><script>alert(1)</script>" \x00\x1b[0m \ud800 \u2028 é'


def step_record(step, layers=2, experts=4, rng=None, **changes):
    rng = rng or random.Random(step)
    counts = [[rng.randrange(1, 60) for _ in range(experts)] for _ in range(layers)]
    imbalance = [max(row) * experts / sum(row) for row in counts]
    values = {
        "step": step,
        "loss": 1.8 + 3.8 / step,
        "balance_loss": 1.01,
        "auxiliary_loss": 0.0101,
        "z_loss": 2.5,
        "grad_norm": 0.5 + 1 / step,
        "learning_rate": 3e-4 * step,
        "tokens": 4093,
        "seconds": 0.21,
        "tokens_per_second": 19490.0 + step,
        "worst_imbalance": max(imbalance, default=None),
        "expert_counts": counts,
        "imbalance": imbalance,
        "honesty": [rng.uniform(-0.5, 1.5) for _ in range(layers)],
        "entropy_deficit": [0.1] * layers,
        "dead_experts": [0] * layers,
    }
    return StepRecord(**(values | changes))


def heldout_record(step, loss):
    return HeldoutRecord(step=step, loss=loss, tokens=1000, seconds=1.0)


def make(folder, records, *, sample=SAMPLE, config=CONFIG, summary=SUMMARY, **options):
    path = write_report(
        folder / "report.html", title="a <run> & more", config=config, summary=summary,
        records=records, sample=sample, **options,
    )  # fmt: skip
    return path.read_text("utf-8")


def parse(page) -> Any:
    """Parse the page as XML, the strictest form of well-formed."""
    return ElementTree.fromstring(page)


def xy(line) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def words(tree):
    return " ".join("".join(tree.itertext()).split())


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    records = [RunHeader(step=0, info={"bytes_per_token": 1.0}), heldout_record(0, 5.6)]
    records += [step_record(step) for step in range(1, 41)]
    records.append(heldout_record(40, 1.9))
    return make(tmp_path_factory.mktemp("report"), records, layer_names=["block $1$", "block <2>"])


def test_the_page_is_well_formed_and_every_id_is_unique(page):
    tree = parse(page)
    ids = [element.get("id") for element in tree.iter() if element.get("id")]
    assert len(ids) > 100
    assert len(ids) == len(set(ids))
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)
    assert used
    assert {a or b for a, b in used} <= set(ids)


def test_the_page_refers_to_nothing_outside(page):
    tree = parse(page)
    for element in tree.iter():
        assert element.tag.split("}")[-1] not in {"script", "link", "iframe", "img", "object"}
        for name, value in element.attrib.items():
            if name.split("}")[-1] in {"href", "src", "action", "srcset"}:
                assert value.startswith(("#", "data:image/png;base64,")), value
    # What is left of the network are the names of XML's namespaces.
    links = set(re.findall(r"\w+://[^\"' <]+", page))
    assert links == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_text_is_escaped_and_control_characters_are_visible(page):
    assert "<script>" not in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)
    tree = parse(page)
    sampled = "".join(tree.find(".//pre").itertext())
    expected = SAMPLE.replace("\x00", "\\x00").replace("\x1b", "\\x1b").replace("\ud800", "?")
    assert sampled == expected
    assert tree.find(".//h1").text == tree.find(".//title").text == "a <run> & more"
    rows = ["".join(cell.itertext()) for cell in tree.findall(".//td")]
    assert "<soft&max>" in rows


def test_the_headline_numbers_and_the_facts(page):
    tree = parse(page)
    cards = [[part.text for part in card] for card in tree.find(".//dl")]
    assert cards == [
        ["Held-out loss", "1.834", "nats per byte"],
        ["Bits per byte", "2.646", "held-out text"],
        ["Throughput", "22.7k", "tokens per second"],
        ["Parameters", "2.11M", "in total"],
        ["Active parameters", "1.22M", "per token"],
        ["Steps", "1,600", "of the optimizer"],
        ["Tokens", "2.46M", "trained on"],
        ["Time", "1:02:05", "of training"],
    ]
    text = words(tree)
    assert "model.moe.experts" in text
    assert "hardware.device" in text
    assert "versions.torch" in text


def test_every_picture_is_there_with_its_axes_and_units(page):
    tree = parse(page)
    labels = [[t.text for t in svg.iter(f"{SVG}text")] for svg in tree.iter(f"{SVG}svg")]
    expected = [
        {"cross-entropy (nats per byte)", "bits per byte", "training", "held-out", "1.900"},
        {"block $1$", "expert"},
        {"block <2>", "expert", "optimizer step", "share at the end"},
        {"honesty  cov(f, P) / var(f)", "honest", "blind", "gerrymandered", "block $1$"},
        {"busiest expert's load / mean load", "block $1$", "block <2>"},
        {"learning rate", "optimizer step"},
        {"gradient norm", "optimizer step"},
        {"tokens per second", "optimizer step"},
    ]
    assert len(labels) == len(expected)
    for found, wanted in zip(labels, expected, strict=True):
        assert wanted <= {" ".join(t.split()) for t in found} | set(found)
    assert "At 1 gate probability follows" in words(tree)


def test_colours_follow_the_theme(page):
    assert "prefers-color-scheme:dark" in page
    for name, (light, dark) in pictures.COLOURS.items():
        assert page.count(light) == 1, f"{name} is drawn with a fixed colour"
        assert page.count(dark) == 1
    assert "#000000" not in page


def test_the_same_run_gives_the_same_bytes(tmp_path):
    records = [step_record(step) for step in (1, 2, 3)]
    here = make(tmp_path, records)
    assert make(tmp_path, [{"kind": "step", **dataclasses.asdict(r)} for r in records]) == here
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [heldout_record(0, 5.6)],
        [heldout_record(3, math.nan)],
        [step_record(5)],
        [step_record(1, layers=0), step_record(2, layers=0)],
        [step_record(1, layers=1, experts=1), step_record(2, layers=1, experts=1)],
        [step_record(1, expert_counts=[[0] * 4] * 2, imbalance=[math.nan] * 2)],
        [step_record(s, expert_counts=[[5] * 4] * 2, honesty=[math.nan] * 2) for s in (1, 2)],
    ],
    ids=["none", "heldout", "heldout-nan", "one", "dense", "one-expert", "no-route", "balanced"],
)
def test_awkward_histories(tmp_path, records):
    text = words(parse(make(tmp_path, records, sample="", config={}, summary={})))
    assert ("No steps were recorded." in text) == (not records)
    has_steps = any(isinstance(record, StepRecord) for record in records)
    dense = has_steps and not records[-1].expert_counts
    assert ("no mixture-of-experts layer" in text) == dense
    assert ("Routes requested per expert" in text) == (has_steps and not dense)
    assert "No text was sampled." in text
    assert "nan" not in text


def test_values_that_are_not_finite_are_counted_and_leave_gaps(tmp_path):
    broken = [math.nan, math.inf, -math.inf, 1e308]
    records = [step_record(step) for step in range(1, 9)]
    records += [
        step_record(9 + i, loss=value, grad_norm=value, learning_rate=value, imbalance=[value] * 2,
                    honesty=[value] * 2, tokens_per_second=value, heldout_loss=value)
        for i, value in enumerate(broken)
    ]  # fmt: skip
    text = words(parse(make(tmp_path, records)))
    # Three of the four values, in 4 curves, 2 layers' imbalance and the held-out loss.
    assert f"{3 * (4 + 2 + 1)} recorded values are not finite" in text
    loss = history_of.gather_history(records, None).values["loss"]
    assert np.isfinite(loss).tolist() == [True] * 8 + [False] * 4


def test_thousands_of_records_stay_small_and_keep_their_spikes(tmp_path):
    rng = random.Random(0)
    records = [step_record(step, layers=9, experts=8, rng=rng) for step in range(1, 5001)]
    records[3210] = step_record(3211, layers=9, experts=8, rng=rng, grad_norm=77.0, loss=math.nan)
    page = make(tmp_path, records)
    assert len(page) < 1_000_000
    text = words(parse(page))
    assert "Of 9 layers, pictures show 6" in text
    assert len(parse(page).findall(".//section/table/tbody/tr")) == 9
    history = history_of.gather_history(records, None)
    axes = pictures.draw_grad_norm(history).axes[0]
    _, raw = xy(axes.lines[0])
    assert len(raw) <= 600
    assert raw.max() == 77.0


def test_a_layer_with_dead_experts_is_drawn_and_named(tmp_path):
    records = []
    for step in range(1, 21):
        record = step_record(step, layers=8)
        counts = [[9, 1, 1, 1] for _ in range(8)]
        counts[3] = [3, 3, 3, 3 if step < 10 else 0]
        imbalance = [max(row) * 4 / sum(row) for row in counts]
        honesty = [1.0, 1.0, 1.0, 1.0, 1.0, -0.5, 1.0, 1.0]
        records.append(
            dataclasses.replace(record, expert_counts=counts, imbalance=imbalance, honesty=honesty)
        )
    assert 3 in history_of.gather_history(records, None).drawn
    text = words(parse(make(tmp_path, records)))
    assert "MoE layer 4: 1 of 4 experts got no route at the end." in text
    assert "MoE layer 6 is gerrymandered at the end: honesty -0.50." in text
    assert text.count("got no route") == text.count("is gerrymandered") == 1


def test_the_heat_map_shows_the_load():
    """The picture's own pixels: expert 0 starved and blue, expert 1 hot and red, 2 and 3 even."""
    counts = [[0, 40, 10, 10]]
    records = [
        step_record(step, layers=1, expert_counts=counts, imbalance=[40 * 4 / 60])
        for step in range(1, 6)
    ]
    history = history_of.gather_history(records, None)
    svg = pictures.to_svg(pictures.draw_load(history, 0, True), "load")
    (data,) = re.findall(r"base64,([^\"]+)\"", svg)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA"))
    assert pixels.shape == (4, 5, 4)
    starved, hot, even = (
        pixels[0, 0].astype(int),
        pixels[1, 0].astype(int),
        pixels[2, 0].astype(int),
    )
    assert starved[2] > starved[0] + 100
    assert starved[3] == 255
    assert hot[0] > hot[2] + 100
    assert even[3] < 128
    assert np.ptp(pixels, axis=1).max() == 0


def test_the_bars_are_the_share_of_routes_at_the_end():
    records = [step_record(step, layers=1, expert_counts=[[1, 1, 1, 1]]) for step in range(1, 28)]
    records += [
        step_record(step, layers=1, expert_counts=[[2 * step, 0, 10, 10]]) for step in (28, 29, 30)
    ]
    side = pictures.draw_load(history_of.gather_history(records, None), 0, True).axes[1]
    bars = [bar.get_width() for bar in side.patches if isinstance(bar, Rectangle)]
    total = 2 * (28 + 29 + 30) + 60
    assert bars == pytest.approx([174 / total, 0, 30 / total, 30 / total])
    assert xy(side.lines[0])[0].tolist() == [0.25, 0.25]


def test_pooled_honesty_is_the_slope_over_the_whole_window():
    """Oracle: P from its definition, then both moments summed over the window in plain Python."""
    rng = random.Random(3)
    steps, window, experts = 13, 5, 3
    cov, var, records = [], [], []
    for step in range(1, steps + 1):
        counts = [rng.randrange(1, 30) for _ in range(experts)]
        if step == 4:
            counts = [7, 7, 7]  # var(f) = 0: honesty has no value
        f = [c / sum(counts) for c in counts]
        p = [rng.random() for _ in range(experts)]
        p = [value / sum(p) for value in p]
        cov.append(sum((a - 1 / 3) * (b - 1 / 3) for a, b in zip(f, p, strict=True)) / 3)
        var.append(sum((a - 1 / 3) ** 2 for a in f) / 3)
        honesty = cov[-1] / var[-1] if step != 4 else math.nan
        records.append(
            step_record(step, layers=1, expert_counts=[counts], honesty=[honesty], imbalance=[1.0])
        )
    cov[3] = var[3] = 0.0
    pooled = history_of.gather_history(records, None).pooled_honesty(window)[:, 0]
    for at in range(steps):
        near = range(max(0, at - 2), min(steps, at + 3))
        assert pooled[at] == pytest.approx(sum(cov[i] for i in near) / sum(var[i] for i in near))


def test_curves_show_the_recorded_values():
    records = [step_record(step) for step in range(1, 8)]
    records[2] = dataclasses.replace(records[2], heldout_loss=3.5)
    history = history_of.gather_history([*records, heldout_record(7, 1.25)], None)
    training, heldout = pictures.draw_loss(history).axes[0].lines
    assert xy(training)[0].tolist() == list(range(1, 8))
    assert xy(training)[1] == pytest.approx([r.loss for r in records])
    assert np.stack(xy(heldout)).tolist() == [[3.0, 7.0], [3.5, 1.25]]
    rate = pictures.draw_learning_rate(history).axes[0].lines[0]
    assert xy(rate)[1] == pytest.approx([r.learning_rate for r in records])
    lines = pictures.draw_imbalance(history).axes[0].lines
    for layer in range(2):
        assert xy(lines[layer])[1] == pytest.approx([r.imbalance[layer] for r in records])
    speed = pictures.draw_throughput(history).axes[0].lines[0]
    assert xy(speed)[1] == pytest.approx([r.tokens_per_second for r in records])


def test_smoothing_is_untouched_by_a_huge_value_far_away():
    values = np.full(100, 2.0)
    values[10] = 1e20
    smooth = history_of.smooth(values, 4)
    assert smooth[20:] == pytest.approx(2.0)
    values[50] = np.nan
    assert np.isnan(history_of.smooth(values, 4)).nonzero()[0].tolist() == [50]


def test_bad_records_are_refused_before_the_file_is_touched(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    for records, options, message in [
        ([step_record(1), step_record(2, layers=3)], {}, "same MoE layers"),
        ([step_record(1), step_record(2, experts=5)], {}, "same MoE layers"),
        ([step_record(1)], {"layer_names": ["a"]}, r"one name per MoE layer \(2\), got 1"),
        ([{"kind": "step", "step": 1}], {}, "missing"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(tmp_path, records, **options)
    assert path.read_text() == "old"
