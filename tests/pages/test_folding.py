"""Which lines of a block its reader sees at first."""

from __future__ import annotations

import pytest
from docutils import nodes
from gallery import folding, lessons

IMPORTS = "import a\nimport b\nimport c\nimport d\n"
DRAW = "import matplotlib.pyplot as plt\n"
OWN = "from lm_from_scratch.instruments.plot import figure, mask_map\n"


def shown(code: str) -> list[tuple[str, str]]:
    """The first line of each part, and the line behind which it is folded."""
    return [(part.text.split("\n")[0], part.label) for part in folding.parts((code,))[0]]


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("x = 1\n", [("x = 1", "")]),
        ("x = 1\nassert x\nassert x > 0\n", [("x = 1", ""), ("assert x", "2 checks")]),
        ("x = 1\ntorch.testing.assert_close(x, y)\n",
         [("x = 1", ""), ("torch.testing.assert_close(x, y)", "1 check")]),
        ("assert x\nx = 1\n", [("assert x", "")]),  # before what follows: in its place
        ("for y in x:\n    assert y\n", [("for y in x:", "1 check")]),
        ("print(x)\n", [("print(x)", "")]),
        ("print(f'{x:.2f}')\n", [("print(f'{x:.2f}')", "")]),
        ("print(f'{x:8.2f}')\n", [("print(f'{x:8.2f}')", "code of the table")]),
        ("print(f'{x:>{n}}')\n", [("print(f'{x:>{n}}')", "code of the table")]),
        ("import a\n", [("import a", "")]),
        (IMPORTS, [("import a", "imports")]),
        ("x = 1\nassert_close(x, y)\n", [("x = 1", ""), ("assert_close(x, y)", "1 check")]),
        ("for y in x:\n    print(y)\nelse:\n    z = 1\n", [("for y in x:", "")]),
        (DRAW + "with torch.no_grad():\n    z = f(x)\n    plt.plot(z)\n", [(DRAW.strip(), "")]),
        # What computes is shown, wherever it is imported from.
        ("from lm_from_scratch.instruments.plot import attention_maps\nm = attention_maps(x)\n",
         [("from lm_from_scratch.instruments.plot import attention_maps", "")]),
        ("for y in x:\n    print(y)\n", [("for y in x:", "code of the table")]),
        ("for y in x:\n    z = y\n    print(z)\n", [("for y in x:", "")]),
        (IMPORTS + "x = 1\n", [("import a", "imports"), ("x = 1", "")]),
        ("import a\nx = 1\n", [("import a", "")]),
        (DRAW + "plt.plot(x)\nplt.show()\nassert x\n",
         [("import matplotlib.pyplot as plt", "1 check, code of the figure")]),
        (OWN + "fig, (ax,) = figure()\nfor y in x:\n    z = y\n    ax.plot(z)\n",
         [(OWN.strip(), "code of the figure")]),
        (OWN + "x = 1\n_, axes = figure()\nfor ax, y in zip(axes, x):\n    mask_map(ax, y)\n",
         [(OWN.strip(), ""), ("_, axes = figure()", "code of the figure")]),
        ("ax.plot(x)\n", [("ax.plot(x)", "")]),  # of another library
        ("def f(x):\n    return x\n", [("def f(x):", "")]),
    ],
)  # fmt: skip
def test_a_block_is_folded(code: str, parts: list[tuple[str, str]]) -> None:
    assert shown(code) == parts


def test_names_that_draw_are_known_in_later_blocks() -> None:
    blocks = [DRAW + "fig, ax = plt.subplots()\n", "ax.plot([1])\n", "x.plot([1])\n"]
    assert [parts[0].label for parts in folding.parts(tuple(blocks))] == [
        "code of the figure"
    ] * 2 + [""]


def test_no_line_is_lost() -> None:
    code = IMPORTS + "\n# why\nx = 1\n\n# so\nassert x  # really\n"
    together = "\n".join(part.text for part in folding.parts((code,))[0])
    assert [line for line in together.split("\n") if line] == [
        line for line in code.split("\n") if line
    ]


def test_what_is_read_later_is_shown() -> None:
    """And a name that draws no more, or drew in a loop alone, is one as others."""
    blocks = [
        DRAW + "for y in x:\n    z = y + 1\n    plt.plot(z)\n",
        "w = z\n",
        OWN + "fig, axes = figure()\nfor ax, y in zip(axes, x):\n    ax.plot(y)\n",
        "y.backward()\n",
        "axes = f(x)\n",
        "axes.append(1)\n",
    ]
    labels = [[part.label for part in parts] for parts in folding.parts(tuple(blocks))]
    assert labels == [[""], [""], ["code of the figure"], [""], [""], [""]]


def paragraph(text: str) -> nodes.paragraph:
    return nodes.paragraph("", text)


def asked(*after: nodes.Node) -> nodes.paragraph:
    """A question with three choices and code, and what comes after it."""
    question = nodes.paragraph("", "How many?", classes=[lessons.ASKS])
    offered = nodes.bullet_list("", *(nodes.list_item("", paragraph(t)) for t in ("1", "12", "2")))
    code = nodes.literal_block("", "print(2)", language="Python")
    nodes.section("", question, offered, code, *after)
    return question


def test_an_answer_is_the_output_and_the_paragraph_that_explains_it() -> None:
    output = nodes.container("", classes=["sphx-glr-script-out"])
    why, more = paragraph("Because."), paragraph("And so on.")
    question = asked(nodes.comment(), output, nodes.comment(), why, more)
    assert lessons.hide_answer(question)
    *_, fold, _, after = question.parent.children
    assert fold.children == [output, why] and after is more


def test_an_answer_may_be_what_a_later_block_prints_but_no_text_is_between() -> None:
    output = nodes.container("", classes=["sphx-glr-script-out"])
    later = nodes.literal_block("", "later", language="Python")
    question = asked(nodes.comment(), later, output, paragraph("Because."))
    assert lessons.hide_answer(question) and output.parent is question.parent[-1]
    assert not lessons.hide_answer(asked(paragraph("So."), later.deepcopy(), output.deepcopy()))


def test_an_answer_ends_before_what_does_not_explain_it() -> None:
    for follows in (paragraph("Next?"), nodes.section("", paragraph("Later."))):
        follows["classes"].append(lessons.ASKS)
        output = nodes.container("", classes=["sphx-glr-script-out"])
        question = asked(output, follows)
        assert lessons.hide_answer(question)
        assert question.parent.children[-2].children == [output]
    assert not lessons.hide_answer(asked(paragraph("Nothing was printed.")))


def test_an_answer_of_a_notebook_is_what_all_cells_up_to_the_text_print() -> None:
    outputs = [nodes.container("", classes=["cell_output"]) for _ in range(2)]
    cells = [nodes.container("", output, classes=["cell"]) for output in outputs]
    why = paragraph("Because.")
    question = asked(why)
    question.parent[2:3] = cells
    assert lessons.hide_answer(question)
    assert [*map(len, cells)] == [0, 1] and cells[1][0].children == [*outputs, why]


def test_the_right_choice_is_known_by_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    question = asked()
    assert [lessons.place_of(right, question) for right in ("12", "2", "`1`", "")] == [1, 2, 0, -1]
    assert not caplog.records
    for wrong in ("3", "the number"):
        assert lessons.place_of(wrong, question) == lessons.NONE
    assert len(caplog.records) == 2


def test_what_the_first_block_draws_stands_above_it() -> None:
    for drawn, first in ((nodes.raw("", "<svg>"), True), (nodes.container(), False)):
        drawn["classes"].append("sphx-glr-script-out")
        later = nodes.literal_block("", "later", language="Python")
        question = asked(drawn, paragraph("Then"), later, nodes.raw())
        page, code = question.parent, question.parent[2]
        lessons.show_picture_first(page)
        assert page.index(drawn) == (2 if first else 3) and page.index(code) == (3 if first else 2)
        assert isinstance(page[-1], nodes.raw)
