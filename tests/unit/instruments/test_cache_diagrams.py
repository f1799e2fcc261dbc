"""Drawings of caches: sound, inside their sheet, and right about what is kept."""

from __future__ import annotations

import re

import pytest
from drawings import SVG, drawing_functions, is_sound, parsed, texts

from lm_from_scratch.instruments import cache_diagrams
from lm_from_scratch.instruments.canvas import Canvas, Drawing

WORDS = ["⊢", "If", " <the>", " file", "\n", " does", " not", " exist"]
MASK = [[True, True, False], [True, True, True]]
DRAWINGS = {
    "steps": cache_diagrams.steps("Step", [Canvas(10, 10, "a & b").drawing()] * 2, ["0", "1"]),
    "filling": cache_diagrams.cache_filling(WORDS, 3),
    "one query": cache_diagrams.one_query(WORDS[:3], [0.5, 0.2, 0.3]),
    "slots": cache_diagrams.slot_steps(WORDS, 8, 3),
    "order": cache_diagrams.writing_order(WORDS[:7], 3, 2),
    "padded batch": cache_diagrams.padded_batch(
        [["pad", "<a>"], ["b", " c"]], [[-1, 0], [0, 1]], read=[1, 1]
    ),
    "masks": cache_diagrams.slot_masks({"a": ([0, 1, 2], [1, 2], MASK)}),
}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


@each_drawing
def test_a_drawing_is_sound_and_stays_on_its_sheet(drawing: Drawing) -> None:
    is_sound(drawing)


def test_every_drawing_is_tested() -> None:
    assert len(drawing_functions(cache_diagrams)) == len(DRAWINGS)


def test_a_reader_chooses_one_step() -> None:
    steps = parsed(
        cache_diagrams.steps("Step", [Canvas(9, 9, s).drawing() for s in "abc"], "123", 1)
    )
    buttons = list(steps.iter("input"))
    assert [button.get("checked") for button in buttons] == [None, "checked", None]
    assert len({button.get("name") for button in buttons}) == 1
    assert [label.get("for") for label in steps.iter("label")] == [b.get("id") for b in buttons]
    frames = steps.find("div[@class='frames']")
    style = steps.find("style")
    assert frames is not None and len(frames) == 3 and style is not None
    for i, button in enumerate(buttons):  # each shows its own frame
        rule = f"#{button.get('id')}:checked ~ .frames > :nth-child({i + 1})"
        assert rule in (style.text or "")
    other = cache_diagrams.steps("Step", [Canvas(9, 9, "d").drawing()], ["1"])
    assert parsed(other).find("input").get("id") != buttons[0].get("id")  # type: ignore[union-attr]


def test_a_filling_cache_computes_each_token_once() -> None:
    """After a prompt of three tokens: 3, 4, ... are read without a cache, and with one only one."""
    frames = list(parsed(cache_diagrams.cache_filling(WORDS, 3)).iter(f"{SVG}svg"))
    assert len(frames) == len(WORDS) - 3
    read = 0
    for r, frame in enumerate(frames):
        said, T = texts(frame), 3 + r
        read += T
        assert said.count("again") == said.count("kept") == (T - 1 if r else 0)
        assert said.count("new") == 2 * (1 if r else 3)
        assert said[-2:] == [f"{read} tokens", f"{T} tokens"]
        # with a cache the only query is that of a new token
        assert said.count("q") == T + (1 if r else 3)
        assert said.count("k") == said.count("v") == 2 * T


def test_slots_hold_what_the_caches_of_the_package_hold() -> None:
    torch = pytest.importorskip("torch")
    from lm_from_scratch.cache.growing import GrowingCache
    from lm_from_scratch.cache.slots import SlidingCache, StaticCache

    frames = list(parsed(cache_diagrams.slot_steps(WORDS, 8, 3)).iter(f"{SVG}svg"))
    caches = GrowingCache(1), StaticCache(1, 8), SlidingCache(1, 3)
    for p, frame in enumerate(frames):
        said = texts(frame)
        expected = []
        for cache in caches:
            k = torch.zeros(1, 1, 1, 2)
            cache.see(k[:, 0], windows=[3])
            cache[0].update(k, k)
            expected += [place for place in cache.contents(0)[2][0].tolist() if place >= 0]
        assert [int(text) for text in said if text.isdigit()] == expected
        slots = caches[0].keys[0].slots
        assert f"growing: {slots} {'slots' if slots > 1 else 'slot'}" in said
        assert ("is overwritten" in " ".join(said)) == (p >= 3)


def test_what_is_written_first_is_missed() -> None:
    order = cache_diagrams.writing_order(WORDS[:7], 3, 2)  # 5 and 6 over 2 and 3
    assert "misses a key 1 times" in order.says
    assert order.html.count("<line") == 1
    assert "misses a key 0 times" in cache_diagrams.writing_order(WORDS[:7], 3, 1).says


def test_the_row_of_a_query_is_its_weights() -> None:
    html = cache_diagrams.one_query(["a", "b", "c"], [0.5, 0.25, 0.0]).html
    tints = re.findall(r'fill-opacity="([\d.]+)" stroke="#E69F00"', html)
    assert tints[-3:] == ["0.9", "0.5", "0.1"]


def test_padding_has_mask_0_and_position_minus_1() -> None:
    assert DRAWINGS["padded batch"].says == (
        "row 0: pad | <a>, mask [0, 1], positions [-1, 0]; "
        "row 1: b |  c, mask [1, 1], positions [0, 1]"
    )
