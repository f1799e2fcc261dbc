"""Drawings of weights are sound, inside their sheet, and say what they show."""

from __future__ import annotations

import re

import pytest
import torch
from drawings import SVG, drawing_functions, is_sound, parsed

from lm_from_scratch.instruments import weight_diagrams
from lm_from_scratch.instruments.canvas import Drawing


def a_tensor_with_a_scale() -> torch.Tensor:
    tensor = torch.ones(2, dtype=torch.int8)
    tensor.scale = torch.ones(1)  # type: ignore[attr-defined]
    return tensor


PLAIN, CODES = torch.zeros(2), a_tensor_with_a_scale()
BOTH = {"tensor <1>": PLAIN, "tensor 2": CODES}
DRAWINGS = {
    "rounding": weight_diagrams.rounding(
        {"<wide>": ([0.1, -0.7, 0.4], 0.1, 7), "narrow": ([0.02, 0.07], 0.01, 7)}
    ),
    "holders": weight_diagrams.holders(
        "after", {"name": PLAIN, "<list>": PLAIN, "new": CODES}, BOTH
    ),
    "no holder": weight_diagrams.holders("nobody", {"name": PLAIN}, BOTH),
    "held": weight_diagrams.held_tensors("Tensor (2, 3)", {"codes": ["int8", "<6>"], "scale": []}),
    "doors": weight_diagrams.two_doors(["F.linear"], ["detach", "clone"], ["all else:", "error"]),
    "stations": weight_diagrams.load_stations([f"#{i}" for i in range(5)]),
    "choices": weight_diagrams.choices({"a\nb": "1 c", "<d>": "2 e\nf\ng"}, ("case", "use")),
    "tall": weight_diagrams.low_rank(512, 128, 8, "4 bits"),
    "wide": weight_diagrams.low_rank(128, 512, 1, "4 bits"),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)
    (svg,) = parsed(drawing).iter(f"{SVG}svg")
    assert svg.get("aria-label") == repr(drawing)


def test_every_weight_goes_to_its_nearest_level() -> None:
    drawing = weight_diagrams.rounding({"a": ([0.14, -0.7, 0.68], 0.1, 7)})
    assert repr(drawing) == "a: 3 weights on 3 of 15 levels"
    ends = {}  # where the lines of weights end, and where the tinted levels are
    for end, width in ((61, "1.4"), (71, "3")):
        line = rf'x2="([\d.]+)" y2="{end}"[^>]*stroke-width="{width}"'
        ends[end] = {round(float(x)) for x in re.findall(line, drawing.html)}
    assert ends[61] == ends[71] and len(ends[61]) == 3


def test_levels_too_close_for_labels_have_none() -> None:
    drawing = weight_diagrams.rounding({"a": ([7.0], 1.0, 7), "b": ([0.01], 0.01, 7)})
    assert drawing.html.count(">3</text>") == 1


def test_a_holder_is_at_the_object_that_it_holds() -> None:
    assert repr(DRAWINGS["holders"]) == (
        "after: name, <list> at tensor <1>, which is float32; new at tensor 2, which is int8, scale"
    )
    assert "nobody at tensor 2" in repr(DRAWINGS["no holder"])


def test_equal_contents_have_equal_colours() -> None:
    alike = {"one": PLAIN, "two": torch.ones(3)}
    fills = [
        re.findall(r'<rect[^>]*fill="([^"]+)"', weight_diagrams.holders("", {}, tensors).html)
        for tensors in (BOTH, alike)
    ]
    assert len(set(fills[0])) == 2 and len(set(fills[1])) == 1


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(weight_diagrams)) == len(DRAWINGS) - 2  # two of them twice


def test_matrices_are_in_scale() -> None:
    boxes = [
        (float(mark.get("width", 0)), float(mark.get("height", 0)))
        for mark in parsed(DRAWINGS["tall"]).iter()
        if mark.tag.endswith("rect")
    ]
    (wide, high), b, a = boxes
    assert high == 4 * wide
    assert b == pytest.approx((wide / 16, high)) and a == pytest.approx((wide, wide / 16))


def test_stations_lead_to_their_sections() -> None:
    links = [mark.get("href") for mark in parsed(DRAWINGS["stations"]).iter()]
    assert [link for link in links if link] == ["#0", "#1", "#2", "#3", "#4"]
