"""plot.py: the figures show the numbers that they are given."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from tiny_models import tiny_gpt2, token_ids

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.plot import (
    attention_maps,
    curves,
    error_histogram,
    figure,
    mask_map,
    number_map,
    printable,
    visualize_attention,
)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def test_the_drawn_map_is_the_attention_of_that_head() -> None:
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


def test_a_layer_or_head_that_is_not_there_is_refused() -> None:
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


def test_mask_map_has_a_row_for_each_query() -> None:
    mask = torch.tensor([[True, False, False], [True, True, False]])
    _, (ax,) = figure()
    mask_map(ax, mask, [4, 5], ["a", "b", -1], "two queries")
    np.testing.assert_array_equal(np.asarray(ax.images[0].get_array()), mask.float().numpy())
    assert [t.get_text() for t in ax.get_yticklabels()] == ["4", "5"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["a", "b", "-1"]
    assert ax.get_title() == "two queries"


def test_number_map_writes_what_does_not_round_to_0() -> None:
    _, (ax,) = figure()
    number_map(ax, torch.tensor([[0.4, 12.0], [99.6, 0.5]]), largest=100)
    written = {t.get_position(): (t.get_text(), t.get_color()) for t in ax.texts}
    assert written == {(1, 0): ("12", "black"), (0, 1): ("100", "white")}
    number_map(ax, torch.tensor([[0.04, 0.06]]), largest=1, decimals=1)
    assert [t.get_text() for t in ax.texts[2:]] == ["0.1"]


def test_no_two_curves_differ_by_colour_alone() -> None:
    series = {str(i): ([1, 2], [i, i]) for i in range(4)}
    lines = curves(series, "x", "y", {"a": 1.0, "b": 2.0, "c": 3.0}).axes[0].get_lines()
    assert len({line.get_linestyle() for line in lines[:4]}) == 4
    assert len({line.get_linestyle() for line in lines[4:]}) == 3


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


def test_a_histogram_of_errors_has_area_one_and_a_title() -> None:
    _, (ax,) = figure()
    error_histogram(ax, torch.linspace(-0.5, 0.5, 4001).view(-1, 1), "8 bits")
    area = sum(bar.get_width() * bar.get_height() for bar in ax.patches)
    assert area == pytest.approx(1) and ax.get_title() == "8 bits"
    assert ax.patches[7].get_height() == pytest.approx(1, abs=0.05)
