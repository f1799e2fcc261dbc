"""Figures that more than one page draws. Each function returns the figure and shows nothing.

Colours are those of Okabe and Ito, which readers with any colour vision can tell apart. They hold
on white and on black; maps run from nothing to blue, so that they do, too.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.drawings.colours import COLOURS, LIGHT_GREY
from lm_from_scratch.drawings.colours import GREY as GREY  # pages take it from here
from lm_from_scratch.drawings.labels import printable
from lm_from_scratch.instruments.record import record_attention
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The map from 0 to 1: from transparent to blue.
MAP = ("#0072B200", "#0072B2FF")

STYLE: dict[str, Any] = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
    "font.size": 10,
    "lines.linewidth": 1.8,
}


def figure(
    width: float = 6.4, height: float = 3.6, rows: int = 1, columns: int = 1
) -> tuple["Figure", "list[Axes]"]:
    """A figure of ``width`` x ``height`` inches in the style of this project, and its axes."""
    import matplotlib.pyplot as plt
    from cycler import cycler

    style: Any = {**STYLE, "axes.prop_cycle": cycler(color=COLOURS)}
    with plt.rc_context(style):
        sheet, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False)
    return sheet, list(axes.flat)


def blues() -> Any:
    """`MAP` as a colour map of Matplotlib."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("blues", MAP)


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    levels: Mapping[str, float] | None = None,
) -> "Figure":
    """Lines by name, each given as (x, y), and horizontal reference ``levels`` by name."""
    sheet, (ax,) = figure(4.8, 3.2)
    dashes = ("-", "--", "-.", ":")  # a colour is never the only difference
    for i, (name, (x, y)) in enumerate(series.items()):
        ax.plot(x, y, dashes[i % 4], label=name)
    for i, (name, level) in enumerate((levels or {}).items()):
        colour = (COLOURS[7], COLOURS[3], COLOURS[4])[i % 3]  # yellow is for areas, not for lines
        ax.axhline(level, linestyle=dashes[1 + i % 3], linewidth=1.2, color=colour, label=name)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend(frameon=False)
    return sheet


def error_histogram(ax: "Axes", errors: Tensor, title: str) -> None:
    """Draw how often each of the rounding ``errors`` (any shape) occurs, in steps. The line: an
    even spread."""
    ax.hist(errors.detach().cpu().flatten().numpy(), 41, density=True, color=COLOURS[0])
    ax.axhline(1.0, color=COLOURS[7], linestyle="--", linewidth=1.2)
    ax.set(title=title, xlabel="error / step", ylabel="density")


def mask_map(
    ax: "Axes", mask: Tensor, queries: Sequence[object], keys: Sequence[object], title: str = ""
) -> None:
    """Draw a ``mask`` (T, S): blue where a query (row) may see a key (column), grey elsewhere."""
    from matplotlib.colors import ListedColormap

    T, S = mask.shape
    two = ListedColormap([LIGHT_GREY, COLOURS[0]])
    ax.imshow(mask.float().cpu().numpy(), cmap=two, vmin=0, vmax=1)
    ax.set_xticks(range(S), [str(key) for key in keys], fontsize=8)
    ax.set_yticks(range(T), [str(query) for query in queries], fontsize=8)
    ax.set_xticks([s - 0.5 for s in range(1, S)], minor=True)
    ax.set_yticks([t - 0.5 for t in range(1, T)], minor=True)
    ax.grid(False)
    ax.grid(which="minor", color="white", linewidth=1.2)
    ax.tick_params(which="both", length=0)
    ax.set_title(title, fontsize=10)


def number_map(ax: "Axes", values: Tensor, largest: float, decimals: int = 0) -> None:
    """Draw a matrix of ``values`` (rows, columns) in shades up to ``largest``, numbers written in.

    A number that rounds to 0 is left out.
    """
    ax.imshow(values.cpu().numpy(), cmap=blues(), vmin=0.0, vmax=largest, aspect="auto")
    for row, line in enumerate(values.tolist()):
        for column, value in enumerate(line):
            text = f"{value:.{decimals}f}"
            if float(text) != 0:
                colour = "white" if value > 0.85 * largest else "black"
                ax.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
    ax.grid(False)


def attention_map(ax: "Axes", weights: Tensor, labels: Sequence[str], title: str = "") -> None:
    """Draw one map of ``weights`` (T, S): row t shows where token t looks. Labels are token
    texts."""
    ax.imshow(weights.cpu().numpy(), cmap=blues(), vmin=0.0, vmax=1.0)
    names = [printable(label) for label in labels]
    ax.set_xticks(range(weights.shape[1]), names[: weights.shape[1]], rotation=90, fontsize=8)
    ax.set_yticks(range(weights.shape[0]), names[-weights.shape[0] :], fontsize=8)
    ax.set_title(title, fontsize=10)
    ax.grid(False)


def visualize_attention(
    model: CausalLM, tokenizer: Tokenizer, text: str, layer: int = 0, head: int = 0
) -> "Figure":
    """The attention weights of one head while the model reads ``text`` as a new document.

    Raises ``ValueError`` for a layer or a head that is not there.
    """
    n_layer, n_head = model.config.n_layer, model.config.n_head
    if not 0 <= layer < n_layer:
        raise ValueError(f"layer={layer} is not in 0 ... {n_layer - 1}")
    if not 0 <= head < n_head:
        raise ValueError(f"head={head} is not in 0 ... {n_head - 1}")
    ids = tokenizer.start(text)
    weights = attention_maps(model, torch.tensor([ids]))[layer][0, head]
    side = max(3.0, 0.24 * len(ids))
    sheet, (ax,) = figure(side + 0.8, side + 0.8)
    attention_map(ax, weights, tokenizer.pieces(ids), f"layer {layer}, head {head}")
    return sheet


def attention_maps(
    model: CausalLM, idx: Tensor, attention_mask: Tensor | None = None
) -> list[Tensor]:
    """The attention weights (B, H, T, T) of every layer while the model reads ``idx`` (B, T), of
    which ``attention_mask`` (B, T) says what is padding."""
    positions = None if attention_mask is None else positions_from_mask(attention_mask)
    with evaluating(model), record_attention(model) as maps:
        model(idx, positions=positions)
    return [layer[0] for layer in maps]
