"""Drawings of what a model learns are sound, and say what they show."""

from __future__ import annotations

from drawings import drawing_functions, is_sound, parsed

from lm_from_scratch.instruments import answer_diagrams as diagrams

PIECES = ["<|im_start|>", "2", "+", "3", "\n", "5", "<|im_end|>"]
PARTS = ["template", "question", "question", "question", "template", "answer", "template"]
COUNTS = [False] * 5 + [True] * 2
DRAWING = diagrams.learned(PIECES, PARTS, COUNTS)


def test_the_drawing_is_sound() -> None:
    is_sound(DRAWING)
    assert drawing_functions(diagrams) == ["learned"]


def test_it_says_what_counts() -> None:
    assert DRAWING.says == (
        "[template] '<|im_start|>' [question] '2+3' [template] '\\n' "
        "[answer, counts] '5' [template, counts] '<|im_end|>'"
    )


def test_a_part_has_one_colour_and_what_counts_a_line() -> None:
    spans = [span for span in parsed(DRAWING).iter("span") if span.text]
    styles = [span.get("style", "") for span in spans]
    assert [span.text for span in spans] == [
        "<|im_start|>", "2", "+", "3", "↵", "5", "<|im_end|>",
        "template", "question", "answer", "counts in training",
    ]  # fmt: skip
    assert ["solid" in style for style in styles] == [*COUNTS, False, False, False, True]
    colours = [style.partition("background: ")[2].partition(";")[0] for style in styles]
    names = dict(zip(["template", "question", "answer"], colours[7:10], strict=True))
    assert colours[:7] == [names[part] for part in PARTS]
