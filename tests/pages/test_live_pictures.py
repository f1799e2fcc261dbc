"""The live model's place in a page: pictures without scripts, downloads without widgets."""

from __future__ import annotations

import io
import json
import math
import zipfile

import pytest
import torch
from docutils.core import publish_doctree
from gallery import downloads, pages
from live import pictures, tour, training, widgets

from lm_from_scratch.checkpoint.weights import load_shipped

USED = [script for script in pages.scripts() if ".. live::" in script.read_text()]


@pytest.mark.parametrize(
    ("widget", "model"),
    [
        (widget, model)
        for widget in sorted(set(widgets.INVITATIONS) - {"tour"})
        for model in ("gpt2-docs", "qwen2-docs")
        if (widget, model) != ("train", "qwen2-docs")  # it trains a model of its own
    ],
)
def test_shares_of_a_picture_are_shares(widget: str, model: str) -> None:
    caption, rows = pictures.picture(widget, model, widgets.PROMPT)
    assert caption and rows and all(label and 0 <= share <= 1 for label, share, _ in rows)
    if widget == "look":  # one row of a softmax
        assert sum(share for _, share, _ in rows) == pytest.approx(1, abs=1e-5)


def test_a_state_of_another_run_moves_the_key() -> None:
    prompt = "The key is in the [hall|kitchen]. Where is the key? The key is in the _."
    caption, rows = pictures.picture("move", "worlds", prompt)
    labels = ["␣hall, before", "␣hall, after", "␣kitchen, before", "␣kitchen, after"]
    assert [label for label, _, _ in rows] == labels and "[" not in caption
    shares = [share for _, share, _ in rows]
    assert min(shares[0], shares[3]) > 0.8 and max(shares[1:3]) < 0.1


def test_a_small_model_learns_the_stories() -> None:
    """From a uniform guess to well below what the frequencies of characters alone would give."""
    text = training.texts()["english"]
    losses = training.losses(text, 100)
    counts = torch.tensor([text.count(one) for one in set(text)])
    frequencies = torch.distributions.Categorical(counts / len(text)).entropy().item()
    assert losses[0] == pytest.approx(math.log(len(counts)), abs=0.3)
    assert sum(losses[-10:]) / 10 < frequencies - 0.8


def test_every_widget_has_a_script_an_invitation_and_a_picture() -> None:
    scripts = {path.stem for path in (widgets.LIVE / "widgets").glob("*.js")}
    assert scripts == set(widgets.INVITATIONS) == set(pictures.PICTURES)


def test_the_last_block_says_what_the_model_says() -> None:
    label, share, _ = pictures.lens("qwen2-docs", widgets.PROMPT)[-1]
    (best, most, _) = pictures.picture("next", "qwen2-docs", widgets.PROMPT)[1][0]
    assert label.endswith(f": {best}") and share == pytest.approx(most, abs=1e-6)


def test_the_states_of_the_tour_are_those_of_the_model() -> None:
    model, tokenizer = load_shipped(tour.MODEL)
    ids = tokenizer.start(widgets.PROMPT)
    states = tour.stages(model.eval(), ids)
    block, x = model.backbone.layers[0], model.head.weight[ids]  # type: ignore[union-attr]
    seen: list[torch.Tensor] = []
    hook = block.register_forward_hook(lambda _, __, y: seen.append(y[0, -1]))  # type: ignore
    with torch.no_grad():
        model(torch.tensor([ids]))
    hook.remove()
    torch.testing.assert_close(states["embedded"], x[-1])
    torch.testing.assert_close(states["behind"], seen[0])


SCRIPT = '''"""
Title
=====

.. live:: next
   :prompt: a

Text
"""

# %%
# A section
# ---------
#
# .. live:: look
#    :prompt: b
#
# More text.

print(1)
'''


def test_downloads_have_no_widgets() -> None:
    text = downloads.file("a.py", SCRIPT.encode()).decode()
    assert "live" not in text and "prompt" not in text
    for kept in ("Title\n=====\n\nText", "# ---------\n#\n# More text.", "print(1)"):
        assert kept in text
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("x/a.py", SCRIPT)
        file.writestr("x/b.bin", b"\x00\xff")
    with zipfile.ZipFile(io.BytesIO(downloads.file("a.zip", archive.getvalue()))) as file:
        assert file.read("x/a.py").decode() == text and file.read("x/b.bin") == b"\x00\xff"


@pytest.mark.parametrize("script", USED, ids=lambda path: path.stem)
def test_notebooks_have_no_widgets(script: object) -> None:
    text = json.dumps(downloads.convert(script))  # type: ignore[arg-type]
    assert "live::" not in text and "model: gpt2-docs" not in text


def test_a_widget_that_does_not_exist_is_an_error() -> None:
    from docutils.parsers.rst import directives

    directives.register_directive("live", widgets.Live)
    document = publish_doctree(
        ".. live:: nothing", settings_overrides={"report_level": 5, "halt_level": 6}
    )
    assert "there is no widget 'nothing'" in document.astext()
