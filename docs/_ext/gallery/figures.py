"""A figure of Matplotlib becomes a part of the page: SVG whose ink is the colour of the text.

So it is readable on a light and a dark background, and its words can be found and selected. On a
phone a wide figure scrolls inside itself. The card of a page shows a picture of it on white.
"""

import io
import re
from html import escape
from pathlib import Path
from typing import Any

from sphinx_gallery.scrapers import _matplotlib_fig_titles, _single_line_sanitize

from lm_from_scratch.instruments import plot

#: Colours of Matplotlib that follow the theme; all others are readable in both.
THEMED = {"#000000": "currentColor", "#ffffff": "var(--lm-ground)"}
THEMED |= dict.fromkeys(("#dddddd", "#e4e4e4", "#f4f4f4"), "var(--lm-faint)")
#: In pixels: what a figure shrinks to, where letters can still be read.
NARROW = 500
RST = """
.. raw:: html
   :file: {}

"""


def scraper(block: Any, block_vars: dict[str, Any], conf: dict[str, Any]) -> str:
    """What the gallery writes in the place of each figure of a block."""
    import matplotlib.pyplot as plt

    directives = ""
    for number, place in zip(plt.get_fignums(), block_vars["image_path_iterator"], strict=False):
        figure, path = plt.figure(number), Path(place)
        figure.savefig(path)  # for the card
        drawn = path.with_suffix(".svg.html")
        drawn.write_text(themed(figure, path.stem), encoding="utf-8")
        directives += RST.format(f"images/{drawn.name}")
    plt.close("all")
    return directives


def themed(figure: Any, name: str) -> str:
    """A figure as SVG for a page; ``name`` makes its ids differ from those of others."""
    import matplotlib as mpl

    for axes in figure.axes:
        for mapped in [*axes.images, *axes.collections]:
            if mapped.get_array() is not None:
                mapped.set_cmap(on_any_background(mapped.get_cmap()))
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, dpi=200, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>|\s*<style.*?</style>", "", svg, flags=re.S)
    # White letters, also those of a formula, are on a colour and stay: they are renamed before all
    # other white becomes the background. The size is read before the new head replaces it.
    svg = re.sub(
        r"(<text[^>]*?)#ffffff|(<g style=\"fill: )#ffffff(?=[^>]*>\s*<text)", r"\1\2white", svg
    )
    for colour, variable in THEMED.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    width, height = (
        float(n) * 4 / 3 for n in re.findall(r'(?:width|height)="([\d.]+)pt"', svg)[:2]
    )
    alt = escape(_single_line_sanitize(_matplotlib_fig_titles(figure)))
    size = f"min-width: {NARROW}px; " if width > NARROW else ""
    head = (
        f'<svg role="img" aria-label="{alt}" width="{width:.0f}" height="{height:.0f}" '
        f'style="{size}stroke-linejoin: round" fill="currentColor" '
    )
    svg = re.sub(r"<svg\b.*?(?=viewBox)", lambda _: head, svg, count=1, flags=re.S)
    svg = re.sub(r'(viewBox="[^"]*")[^>]*>', r"\1>", svg, count=1)
    return f'<div class="figure">{svg.strip()}</div>\n'


def on_any_background(colours: Any) -> Any:
    """A colour map with its white made transparent and its light grey translucent, so that the
    page's background shows."""
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap, to_hex

    if isinstance(colours, ListedColormap):
        clear = {"#ffffffff": "#ffffff00", "#e4e4e4ff": "#76767633"}
        codes = [to_hex(colour, keep_alpha=True) for colour in colours.colors]
        return ListedColormap([clear.get(code, code) for code in codes])
    ends = ("#D55E00FF", "#D55E0000", "#0072B200", "#0072B2FF")
    both = LinearSegmentedColormap.from_list("both", list(zip((0, 0.5, 0.5, 1), ends, strict=True)))
    return {"Blues": plot.blues(), "RdBu": both}.get(colours.name, colours)
