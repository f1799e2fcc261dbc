"""Drawings of positions: what they show, and that nothing leaves the sheet."""

from drawings import drawing_functions, is_sound, parsed, texts

from lm_from_scratch.instruments import position_diagrams as diagrams

DRAWN = {
    "two_questions": diagrams.two_questions(list("abcdefghijkl"), (9, 2), (11, 8)),
    "turned_features": diagrams.turned_features({"all": 8, "half": 4, "none": 0}, 8),
    "layer_kinds": diagrams.layer_kinds(
        {"one": "RRRN", "two": "LLLLLG"}, {"R": "rotates", "N": "does not", "L": "l", "G": "g"}
    ),
}


def test_every_drawing_is_sound() -> None:
    assert set(DRAWN) == set(drawing_functions(diagrams))
    for drawing in DRAWN.values():
        is_sound(drawing)


def test_what_they_say() -> None:
    assert "looks 3 places back, at 8" in repr(DRAWN["two_questions"])
    assert "half: 4 of 8 features turn" in repr(DRAWN["turned_features"])
    pairs = [text for text in texts(parsed(DRAWN["turned_features"])) if text.isdigit()]
    assert pairs == list("01230123") + list("0101")
    assert "one, from below: R R R N" in repr(DRAWN["layer_kinds"])
