"""Which lines of a block its reader sees at first."""

from __future__ import annotations

import folding
import pytest

IMPORTS = "import a\nimport b\nimport c\nimport d\n"
DRAW = "import matplotlib.pyplot as plt\n"
OWN = "from lm_from_scratch.instruments.plot import figure, mask_map\n"


def shown(code: str) -> list[tuple[str, str]]:
    """The first line of each part, and the line behind which it is folded."""
    return [(part.text.split("\n")[0], part.label) for part in folding.parts([code])[0]]


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("x = 1\n", [("x = 1", "")]),
        ("x = 1\nassert x\nassert x > 0\n", [("x = 1", ""), ("assert x", "checked: 2")]),
        ("x = 1\ntorch.testing.assert_close(x, y)\n",
         [("x = 1", ""), ("torch.testing.assert_close(x, y)", "checked: 1")]),
        ("assert x\nx = 1\n", [("assert x", "")]),  # before what follows: in its place
        ("for y in x:\n    assert y\n", [("for y in x:", "checked: 1")]),
        ("print(x)\n", [("print(x)", "")]),
        ("print(f'{x:.2f}')\n", [("print(f'{x:.2f}')", "printing code")]),
        ("for y in x:\n    print(y)\n", [("for y in x:", "printing code")]),
        ("for y in x:\n    z = y\n    print(z)\n", [("for y in x:", "")]),
        (IMPORTS + "x = 1\n", [("import a", "imports"), ("x = 1", "")]),
        ("import a\nx = 1\n", [("import a", "")]),
        (DRAW + "plt.plot(x)\nplt.show()\nassert x\n",
         [("import matplotlib.pyplot as plt", "checked: 1, figure code")]),
        (OWN + "fig, (ax,) = figure()\nfor y in x:\n    z = y\n    ax.plot(z)\n",
         [(OWN.strip(), "figure code")]),
        (OWN + "x = 1\n_, axes = figure()\nfor ax, y in zip(axes, x):\n    mask_map(ax, y)\n",
         [(OWN.strip(), ""), ("_, axes = figure()", "figure code")]),
        ("ax.plot(x)\n", [("ax.plot(x)", "")]),  # of another library
        ("def f(x):\n    return x\n", [("def f(x):", "")]),
    ],
)  # fmt: skip
def test_a_block_is_folded(code: str, parts: list[tuple[str, str]]) -> None:
    assert shown(code) == parts


def test_names_that_draw_are_known_in_later_blocks() -> None:
    blocks = [DRAW + "fig, ax = plt.subplots()\n", "ax.plot([1])\n", "x.plot([1])\n"]
    assert [parts[0].label for parts in folding.parts(blocks)] == ["figure code"] * 2 + [""]


def test_no_line_is_lost() -> None:
    code = IMPORTS + "\n# why\nx = 1\n\n# so\nassert x  # really\n"
    together = "\n".join(part.text for part in folding.parts([code])[0])
    assert [line for line in together.split("\n") if line] == [
        line for line in code.split("\n") if line
    ]
