"""Drawings of latent attention: what a token leaves in a cache, and what is made from it."""

from collections.abc import Sequence

from lm_from_scratch.instruments.canvas import BLUE, GREEN, INK, ORANGE, Canvas, Drawing


def size(n: float) -> str:
    """``n`` bytes, as "8 KiB" or "2.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if n >= 10 or n == int(n) else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:,.0f} TiB"


def bars(models: Sequence[tuple[str, str, int]]) -> Drawing:
    """For each model a bar, whose length is the bytes of a token in its cache: ``models`` are
    (name, kind, bytes). Bars of the kind MLA are orange."""
    left, right, row = 8, 335, 42
    longest = max(amount for _, _, amount in models)
    canvas = Canvas(343, row * len(models), "")
    for i, (name, kind, amount) in enumerate(models):
        y, colour = row * i, ORANGE if kind == "MLA" else BLUE
        canvas.text(left, y + 9, f"{name}: {kind}", 13, "start", bold=kind == "MLA")
        canvas.text(right, y + 9, size(amount), 13, "end")
        canvas.box(
            left, y + 19, max(2, (right - left) * amount / longest), 14, colour, 0.7, radius=2
        )
    canvas.says = "Bytes of a token: " + "; ".join(
        f"{name} ({kind}) {size(amount)}" for name, kind, amount in models
    )
    return canvas.drawing()


def one_token(C: int, R: int, H: int, Dn: int, Dr: int, Dv: int) -> Drawing:
    """A state of C numbers becomes a latent of R and a turned key of Dr, which are kept. From them
    each of H heads makes a key of Dn + Dr and a value of Dv."""
    canvas = Canvas(
        343, 252,
        f"A token's state of {C:,} numbers becomes a latent of {R} and a turned key of {Dr}: "
        f"{R + Dr} numbers are kept. From the latent each of {H} heads makes {Dn} features of its "
        f"key and {Dv} of its value; the turned {Dr} are the same in all heads. Together the heads "
        f"have {H * (Dn + Dr + Dv):,} numbers",
    )  # fmt: skip
    canvas.box(72, 4, 200, 30)
    canvas.text(172, 19, f"state: {C:,} numbers", 13)
    canvas.line(130, 34, 100, 66, arrow=True)
    canvas.line(240, 34, 278, 66, arrow=True)
    canvas.box(14, 68, 196, 32, BLUE, 0.35)
    canvas.text(112, 84, f"latent c: {R}", 14, bold=True)
    canvas.box(226, 68, 108, 32, ORANGE, 0.35)
    canvas.text(280, 84, f"turned r: {Dr}", 14, bold=True)
    canvas.text(172, 116, f"kept for each token: {R + Dr} numbers", 13)
    canvas.line(8, 130, 335, 130, 1.2, INK, 0.6, dashes="4 4")
    for i, head in enumerate(("head 1", "head 2", "...", f"head {H}")):
        y = 142 + 27 * i
        if head == "...":
            canvas.text(40, y + 9, f"{H - 3} more", 12)
            continue
        canvas.text(40, y + 9, head, 12)
        canvas.box(82, y, 92, 20, BLUE, 0.15)
        canvas.text(128, y + 10, f"key {Dn}", 12)
        canvas.box(176, y, 50, 20, ORANGE, 0.15)
        canvas.text(201, y + 10, f"r {Dr}", 12)
        canvas.box(242, y, 92, 20, GREEN, 0.15)
        canvas.text(288, y + 10, f"value {Dv}", 12)
    return canvas.drawing()
