"""Drawings of weights: levels to which they are rounded, and who holds a tensor."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from lm_from_scratch.instruments.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, Canvas, Drawing


def rounding(rows: Mapping[str, tuple[Sequence[float], float, int]]) -> Drawing:
    """Weights, each with a line to the nearest level, on one ruler for all rows.

    A row of the drawing, by its title: the weights, the scale and the largest code ``top``. Levels
    are ``scale`` times a whole number from ``-top`` to ``top``; the used ones are tinted.
    """
    reach = max(max(top * scale, *map(abs, weights)) for weights, scale, top in rows.values())
    left, right, high = 12, 331, 96
    says = []
    canvas = Canvas(343, high * len(rows), "")

    def place(value: float) -> float:
        return left + (right - left) * (value / reach + 1) / 2

    for i, (title, (weights, scale, top)) in enumerate(rows.items()):
        y = high * i
        codes = [round(weight / scale) for weight in weights]
        wide = place(scale) - place(0)
        canvas.text(2, y + 12, title, 12, "start", bold=True)
        canvas.line(left, y + 66, right, y + 66, opacity=0.4)
        for code in range(-top, top + 1):
            x, used = place(scale * code), code in codes
            canvas.line(x, y + 61, x, y + 71, 3 if used else 1.2, ORANGE if used else INK)
            if wide >= 14 or (abs(code) == top and top * wide >= 12):
                label = str(code).replace("-", "−")
                canvas.text(x, y + 83, label, 10, bold=used, opacity=1.0 if used else 0.7)
        for weight, code in zip(weights, codes, strict=True):
            canvas.line(place(weight), y + 36, place(scale * code), y + 61, 1.4, opacity=0.6)
            canvas.circle(place(weight), y + 33, 3.5, BLUE, 0.6, BLUE)
        count = len(set(codes))
        says.append(f"{title}: {len(weights)} weights on {count} of {2 * top + 1} levels")
    canvas.says = "; ".join(says)
    return canvas.drawing()


def holders(title: str, held: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Drawing:
    """Who holds which tensor: an arrow from each holder in ``held`` to its object, one of the
    ``tensors``, and in the object its dtype and the names of its attributes.

    Equal contents have equal colours, in the order of the alphabet.
    """
    row, left, right, wide = 24, 112, 196, 143
    inside = {
        name: ", ".join([str(tensor.dtype).removeprefix("torch."), *vars(tensor)])
        for name, tensor in tensors.items()
    }
    colours = dict(zip(sorted(set(inside.values())), (BLUE, ORANGE, GREEN, PURPLE)))
    groups = {
        name: [holder for holder, one in held.items() if one is tensor]
        for name, tensor in tensors.items()
    }
    canvas = Canvas(
        343, 30 + sum(max(row * len(group), 46) + 10 for group in groups.values()),
        f"{title}: " + "; ".join(
            f"{', '.join(group) or 'nobody'} at {name}, which is {inside[name]}"
            for name, group in groups.items()
        ),
    )  # fmt: skip
    canvas.text(2, 12, title, 13, "start", bold=True)
    y = 30.0
    for name, group in groups.items():
        tall = max(row * len(group), 46)
        middle = y + tall / 2
        colour = colours[inside[name]]
        canvas.box(right, middle - 23, wide, 46, colour, 0.25, colour)
        canvas.text(right + wide / 2, middle - 9, name, 11, opacity=0.85)
        canvas.text(right + wide / 2, middle + 9, inside[name], 13, bold=True)
        for i, holder in enumerate(group):
            start = row * (i - (len(group) - 1) / 2)
            canvas.text(left, middle + start, holder, 13, "end")
            canvas.line(left + 6, middle + start, right - 2, middle + 0.3 * start, arrow=True)
        y += tall + 10
    return canvas.drawing()
