import re
import struct
import xml.etree.ElementTree as ET
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import one_f_one_b, plot, simulate, v_shape, zero_bubble

SVG = "{http://www.w3.org/2000/svg}"


def _pixels(path):
    """Decode a PNG of the simplest kind, checking every part of it."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(
            name + body
        )
        chunks[name] = body
        at += 12 + length
    width, height, *kind = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert kind == [8, 2, 0, 0, 0]
    raw = zlib.decompress(chunks[b"IDAT"])
    assert len(raw) == height * (1 + 3 * width)
    rows = [raw[i * (1 + 3 * width) : (i + 1) * (1 + 3 * width)] for i in range(height)]
    assert all(row[0] == 0 for row in rows)
    return [[tuple(row[1 + 3 * x : 4 + 3 * x]) for x in range(width)] for row in rows]


def _boxes(path):
    """Return (left, top, width, fill, text) of the boxes of an SVG."""
    root = ET.parse(path).getroot()
    rects = root.findall(f"{SVG}rect")[1:]
    texts = [text.text for text in root.findall(f"{SVG}text")][: len(rects)]
    return [
        (float(r.get("x")), float(r.get("y")), float(r.get("width")), r.get("fill"), text)
        for r, text in zip(rects, texts, strict=True)
    ]


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_every_action_has_its_box(any_split_schedule, tmp_path_factory, data):
    timeline = simulate(data.draw(any_split_schedule))
    path = tmp_path_factory.mktemp("plot") / "a.svg"
    plot(timeline, path)
    boxes = _boxes(path)
    kinds = {span.action.kind for span in timeline.spans}
    boxes, legend = boxes[: len(timeline.spans)], boxes[len(timeline.spans) :]
    assert {text for *_, text in legend} == {kind[0].upper() for kind in kinds}
    scale = boxes[0][2] / (timeline.spans[0].end - timeline.spans[0].start)
    for span, (left, top, width, _, text) in zip(timeline.spans, boxes, strict=True):
        assert left == pytest.approx(64 + scale * span.start, rel=1e-2)
        assert width == pytest.approx(scale * (span.end - span.start), rel=1e-2)
        assert (top, text) == (40 + 28 * span.rank, str(span.action.microbatch))


def test_the_words_of_a_picture(tmp_path):
    timeline = simulate(v_shape(4, 8), forward=1.0, backward=1.0)
    plot(timeline, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "v_shape: bubble 23.8 %, makespan 42" in text
    assert re.findall(r">rank (\d)<", text) == ["0", "1", "2", "3"]
    assert re.findall(r">peak (\d)<", text) == ["6"] * 4
    assert re.findall(r">([a-z]+ward)<", text) == ["forward", "backward"]


def test_kinds_and_chunks_differ_in_colour(tmp_path):
    plot(zero_bubble(2, 2, "v"), tmp_path / "a.svg")
    assert len({fill for *_, fill, _ in _boxes(tmp_path / "a.svg")}) == 6
    plot(one_f_one_b(2, 2), tmp_path / "a.svg")
    assert len({fill for *_, fill, _ in _boxes(tmp_path / "a.svg")}) == 2


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), zero_bubble(4, 8, "v")], ids=str)
def test_a_png_has_the_boxes_of_the_svg(tmp_path, schedule):
    plot(schedule, tmp_path / "a.svg")
    plot(schedule, tmp_path / "a.png")
    pixels = _pixels(tmp_path / "a.png")
    for left, top, width, fill, _ in _boxes(tmp_path / "a.svg"):
        colour = tuple(map(int, re.findall(r"\d+", fill)))
        y = round(top) + 2
        assert pixels[y][round(left) + 1] == colour
        assert pixels[y][round(left + width) - 2] == colour
        assert pixels[y][round(left + width) - 1] == (255, 255, 255)
    black = sum(pixel == (0, 0, 0) for row in pixels for pixel in row)
    assert black > 100  # numbers and words


def test_a_microbatch_number_in_a_png(tmp_path):
    plot(one_f_one_b(1, 2), tmp_path / "a.png")
    pixels = _pixels(tmp_path / "a.png")
    # F0.1 is the third box of F0.0 B0.0 F0.1 B0.1, with costs 1 and 2 and a mean of 20 pixels.
    scale = 20 / 1.5
    left, right = round(64 + 3 * scale), round(64 + 4 * scale)
    dots = [
        "".join("#" if pixels[y][x] == (0, 0, 0) else " " for x in range(left, right)).rstrip()
        for y in range(40, 64)
    ]
    glyph = [line.strip() for line in dots if line.strip()]
    assert glyph == ["##"] * 2 + ["####"] * 2 + ["##"] * 4 + ["######"] * 2


def test_other_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`path` must end in `.svg` or `.png`, got '.*a.pdf'"):
        plot(one_f_one_b(1, 1), tmp_path / "a.pdf")
