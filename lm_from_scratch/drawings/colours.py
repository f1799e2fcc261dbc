"""The colours of drawings and plots.

Ink is the colour of the text around a drawing. Other colours are those of Okabe and Ito, which
readers with any colour vision can tell apart, as tints that hold on white and on black.
"""

#: Blue, orange, green, vermilion, purple, sky blue, yellow, black.
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
)  # fmt: skip

#: For what is not data: guides and lines that connect, and areas where nothing is.
GREY, LIGHT_GREY = "#767676", "#E4E4E4"

INK = "currentColor"
BLUE, ORANGE, GREEN, RED, PURPLE = COLOURS[:5]


def tint(colour: str, opacity: float) -> str:
    """A colour as "#0072b2" that lets what is behind it through, for a style."""
    r, g, b = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({r}, {g}, {b}, {opacity:g})"
