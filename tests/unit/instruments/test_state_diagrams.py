"""Drawings of a memory are sound SVG, inside their sheet, and say what they show."""

import torch
from drawings import drawing_functions, is_sound

from lm_from_scratch.instruments import state_diagrams as diagrams
from lm_from_scratch.instruments.canvas import BLUE, ORANGE
from lm_from_scratch.layers.delta_rule import recurrent_delta_rule

STATE = torch.tensor([[1.0, 0.0, -0.5, 0.2], [0.3, 0.8, 0.0, 0.0], [0.0, 0.0, 0.4, -0.6]])
KEY, VALUE = torch.tensor([0.6, 0.0, 0.8]), torch.tensor([0.0, 1.0, 0.0, 0.0])


def test_the_drawing_is_sound_and_shows_one_step_of_the_rule() -> None:
    assert drawing_functions(diagrams) == ["correction"]
    drawing = diagrams.correction(STATE, KEY, VALUE, ("cat", "red"))
    is_sound(drawing)
    is_sound(diagrams.correction(torch.randn(5, 5), torch.randn(5), torch.randn(5)))
    one, zero = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    key, value = KEY[None, None, None], VALUE[None, None, None]
    y, state = recurrent_delta_rule(key, key, value, zero, one, STATE[None, None])
    says = drawing.says
    assert says.startswith("A memory of 3 by 4 numbers says 0.6, 0.0, 0.0, -0.4 for cat; red is")
    assert says.endswith("it says " + ", ".join(f"{abs(n):.1f}" for n in y.flatten().tolist()))
    for number in (KEY[:, None] * (VALUE - KEY @ STATE) + STATE).flatten().tolist():
        assert f"{number:.1f}".replace("-0.0", "0.0").replace("-", "−") in drawing.html
    assert BLUE in drawing.html and ORANGE in drawing.html
    torch.testing.assert_close(state[0, 0], STATE + KEY[:, None] * (VALUE - KEY @ STATE))
