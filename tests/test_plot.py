"""plot.py: the figures show the numbers that they are given."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import tiny_gpt2, token_ids

from lm_from_scratch.checkpoint import load_shipped
from lm_from_scratch.plot import attention_maps, curves, printable, visualize_attention


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def test_G27_the_drawn_map_is_the_attention_of_that_head() -> None:
    model, tokenizer = load_shipped()
    text = "Return the number"
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer.encode(text)]])
    maps = attention_maps(model, ids)
    for layer, head in ((0, 0), (3, 2)):
        drawn = visualize_attention(model, tokenizer, text, layer, head)
        image = drawn.axes[0].images[0].get_array()
        np.testing.assert_array_equal(np.asarray(image), maps[layer][0, head].numpy())
        labels = [t.get_text() for t in drawn.axes[0].get_xticklabels()]
        assert len(labels) == ids.shape[1] and labels[1] == "Return"


def test_G27_a_layer_or_head_that_is_not_there_is_refused() -> None:
    model, tokenizer = load_shipped()
    with pytest.raises(ValueError, match=r"layer=999 is not in 0 \.\.\. 7"):
        visualize_attention(model, tokenizer, "x", layer=999)
    with pytest.raises(ValueError, match=r"head=-1 is not in 0 \.\.\. 3"):
        visualize_attention(model, tokenizer, "x", head=-1)


def test_maps_of_padded_rows_are_those_of_the_row_alone() -> None:
    model = tiny_gpt2()
    idx = token_ids(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), idx], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 6])
    for ours, alone in zip(attention_maps(model, padded, mask), attention_maps(model, idx)):
        torch.testing.assert_close(ours[:, :, 3:, 3:], alone, atol=1e-5, rtol=0)
        assert (ours[:, :, :, :3] == 0).all() and (ours[:, :, :3] == 0).all()


def test_curves_draw_the_series_and_levels() -> None:
    drawn = curves({"a": ([1, 2], [3.0, 4.0])}, "x", "y", levels={"limit": 5.0})
    lines = drawn.axes[0].get_lines()
    assert lines[0].get_ydata().tolist() == [3.0, 4.0]
    assert set(lines[1].get_ydata()) == {5.0}
    assert [t.get_text() for t in drawn.axes[0].get_legend().get_texts()] == ["a", "limit"]


def test_labels_are_visible() -> None:
    assert printable(" a\n\t") == "␣a↵⇥"
    assert printable("\ufffd") == "▯"


def test_drawing_leaves_the_callers_style_alone() -> None:
    before = dict(plt.rcParams)
    curves({"a": ([1], [1.0])}, "x", "y")
    assert dict(plt.rcParams) == before
