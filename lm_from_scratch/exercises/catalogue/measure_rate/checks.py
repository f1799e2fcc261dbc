"""Learning rates that diverge on a quadratic: what is asked is run, for all rates at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers

FAR = 1e4  # times as far as at the start


def diverges(
    H: Tensor, rates: list[float], momentum: float = 0.0, decay: float = 0.0
) -> list[bool]:
    """500 steps from one start, every rate in a row of its own."""
    n, lr = len(H), torch.tensor(rates, dtype=torch.float64)[:, None]
    start = torch.randn(n, generator=Generator().manual_seed(n), dtype=torch.float64)
    x, v = start.repeat(len(rates), 1), torch.zeros(len(rates), n, dtype=torch.float64)
    for _ in range(500):
        v = momentum * v + x @ H + decay * x
        x = x - lr * v
    return [bool(far) for far in ~(x.norm(dim=1) < FAR * start.norm())]


def bowl(g: Generator, curvatures: list[float], turned: bool = True) -> Tensor:
    """A symmetric matrix with these eigenvalues, in directions of its own."""
    n = len(curvatures)
    Q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q
    Q = Q if turned else torch.eye(n, dtype=torch.float64)
    H = Q @ torch.tensor(curvatures, dtype=torch.float64).diag() @ Q.mT
    return (H + H.mT) / 2


def around(g: Generator, limit: float) -> list[float]:
    """Rates on both sides of a limit, some of them near, in any order."""
    shares = torch.tensor([0.05, 0.4, 0.6, 0.8, 0.96, 1.04, 1.2, 1.7, 2.5])
    return [limit * float(shares[i]) for i in torch.randperm(9, generator=g)]


def some(g: Generator, low: int, high: int) -> float:
    return float(integers(g, low, high, 1))


def axes(g: Generator) -> Call:
    h = some(g, 3, 12) / 10
    return call(bowl(g, [0.1 * h, h, 0.5 * h], turned=False), around(g, 2 / h))


def turned(g: Generator) -> Call:
    """One steep direction in which every number has a part, so that none shows how steep it is; and
    one that a start of ones has no part in, not even by rounding."""
    h, n = some(g, 3, 30), 5
    signs = 2.0 * integers(g, 0, 2, n) - 1
    steep = (
        torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0])[torch.randperm(n, generator=g)] * signs
    ).double()
    steep = steep / steep.norm()
    H = 0.05 * h * torch.eye(n, dtype=torch.float64) + 0.95 * h * steep.outer(steep)
    q, order = 2.0 ** some(g, -1, 3), torch.randperm(3, generator=g)
    missed = q * torch.tensor([[2.0, -1.0, 0.0], [-1.0, 2.0, 0.0], [0.0, 0.0, 0.5]]).double()
    return call((H, around(g, 2 / h)), (missed[order][:, order], around(g, 2 / (3 * q))))


def heavy(g: Generator) -> Call:
    h, momentum = some(g, 3, 30), 0.5 + 0.05 * some(g, 0, 9)
    H = bowl(g, [0.2 * h, h, 0.6 * h])
    return call(H, around(g, 2 * (1 + momentum) / h), momentum)


def decayed(g: Generator) -> Call:
    h = some(g, 3, 30)
    return call(bowl(g, [0.2 * h, h, 0.6 * h]), around(g, 2 / (1.8 * h)), 0.0, 0.8 * h)


def falling(g: Generator) -> Call:
    """A direction that falls: every rate diverges, if it is not too small to be seen."""
    h = some(g, 3, 9)
    return call(bowl(g, [-1.5 * h, h, 0.3 * h]), [rate / h for rate in (0.2, 0.5, 1.0, 1.9, 2.5)])


def held(g: Generator) -> Call:
    """It falls, and the decay holds it."""
    h = some(g, 3, 9)
    return call(bowl(g, [-0.5 * h, h, 0.3 * h]), around(g, 2 / (1.7 * h)), 0.0, 0.7 * h)


def both(g: Generator) -> Call:
    h, momentum = some(g, 3, 30), 0.05 * some(g, 6, 9)
    H = bowl(g, [0.2 * h, h, 0.6 * h])
    return call(H, around(g, 2 * (1 + momentum) / (2 * h)), momentum, h)


def falling_on(g: Generator) -> Call:
    """Along the axes it rises; between them it falls, in spite of momentum, or of decay."""
    h = some(g, 3, 9)
    between = (2.0 * integers(g, 0, 2, 3) - 1).double() / 3**0.5
    H = h * torch.eye(3, dtype=torch.float64) - 1.3 * h * between.outer(between)
    rates = [rate / h for rate in (0.3, 0.5, 1.0, 1.9, 2.5)]
    return call((H, rates, 0.5), (H, rates, 0.0, 0.1 * h))


def each(function: Callable[..., list[bool]], *calls: tuple[Any, ...]) -> list[list[bool]]:
    return [function(*given) for given in calls]


def flat(g: Generator) -> Call:
    """Its eigenvalues, which are 0, are computed as numbers around it."""
    h = some(g, 3, 30)
    curvatures, rates = [0.0, h, 0.0, 0.4 * h], around(g, 2 * 1.5 / h)
    H = bowl(g, curvatures)
    while not torch.linalg.eigvalsh(H).min() < 0:
        H = bowl(g, curvatures)
    return call((bowl(g, curvatures, turned=False), rates, 0.5), (H, rates, 0.5))


# ------------------------------------------------------------------------------- wrong answers

CURVES = "torch.linalg.eigvalsh(H) + decay"
HIGH = "curvature.max().item()"
LIMIT = "rate * highest > 2 * (1 + momentum)"
AXES, TURNED, HEAVY = "a bowl along the axes", "a bowl in other directions", "momentum"
DECAYED, BOTH, FALLING = "weight decay", "momentum and weight decay", "a direction that falls"
HELD = "a direction that falls, held by the decay"
ON = "a direction that falls in spite of momentum, or of decay"
FLAT = "flat directions, and momentum"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the limit is 1 / h, where the step lands in the minimum", {LIMIT: f"{LIMIT} / 2"}, AXES),
    ("any number above 1 / h is fine: the limit is 4 / h", {LIMIT: f"{LIMIT} * 2"}, AXES),
    ("True where the run converges", {LIMIT: LIMIT.replace(">", "<")}, AXES),
    ("the flattest direction decides", {HIGH: "curvature.min().item()"}, AXES),
    ("the mean of the directions decides", {HIGH: "curvature.mean().item()"}, AXES),
    ("all directions together: the trace", {HIGH: "curvature.sum().item()"}, AXES),
    ("the length of the whole matrix, not its steepest direction",
     {HIGH: "torch.linalg.matrix_norm(H + decay * torch.eye(len(H))).item()"}, AXES),
    ("the diagonal is taken for the curvatures", {CURVES: "H.diagonal() + decay"}, TURNED),
    ("the largest number of the matrix is taken for the steepest direction",
     {HIGH: "(H.abs().max() + decay).item()"}, TURNED),
    ("the largest sum of a row, which is a bound and no curvature",
     {HIGH: "(H.abs().sum(1).max() + decay).item()"}, TURNED),
    ("the run starts at ones, which have no part in the steepest direction",
     {CURVES: "decay + torch.stack([h for h, q in zip(torch.linalg.eigvalsh(H), "
              "torch.linalg.eigh(H)[1].mT) if abs(q.sum()) > 1e-6])"}, TURNED),
    ("the momentum is not used", {"(1 + momentum)": "1"}, HEAVY),
    ("momentum makes steps longer, so the limit is lower: (1 - momentum)",
     {"(1 + momentum)": "(1 - momentum)"}, HEAVY),
    ("momentum as 1 / (1 - momentum): a longer step allowed by as much",
     {"2 * (1 + momentum)": "2 / (1 - momentum)"}, HEAVY),
    ("the decay is not used", {CURVES: "torch.linalg.eigvalsh(H)"}, DECAYED),
    ("the decay is taken off the curvature", {CURVES: "torch.linalg.eigvalsh(H) - decay"}, DECAYED),
    ("the decay multiplies the curvature",
     {CURVES: "torch.linalg.eigvalsh(H) * (1 + decay)"}, DECAYED),
    ("a direction that falls is not looked at", {"if lowest < -1e-9:": "if False:"}, FALLING),
    ("a direction that falls is taken for a steep one: its size counts",
     {CURVES: "(torch.linalg.eigvalsh(H) + decay).abs()"}, FALLING),
    ("a direction that falls converges at any rate",
     {"[True] * len(rates)": "[False] * len(rates)"}, FALLING),
    ("whatever falls without the decay diverges with it",
     {"if lowest < -1e-9:": "if torch.linalg.eigvalsh(H).min() < -1e-9:"}, HELD),
    ("the decay is that of AdamW, apart from the gradient and its momentum",
     {LIMIT: "rate * (highest - decay) > (2 - rate * decay) * (1 + momentum)"}, BOTH),
    ("momentum holds what falls",
     {"if lowest < -1e-9:": "if lowest < -1e-9 and momentum == 0:"}, ON),
    ("any decay holds what falls", {"if lowest < -1e-9:": "if lowest < -1e-9 and decay == 0:"}, ON),
    ("a fall is looked for along the axes alone",
     {"curvature.min().item()": "(H.diagonal().min() + decay).item()"}, ON),
    ("a number below zero by rounding counts as a fall",
     {"if lowest < -1e-9:": "if lowest < 0:"}, FLAT),
    ("a flat direction counts as diverged", {"if lowest < -1e-9:": "if lowest < 1e-9:"}, FLAT),
    ("one answer for all rates",
     {f"[{LIMIT} for rate in rates]": "[max(rates) * highest > 2 * (1 + momentum)] * len(rates)"},
     AXES),
    ("the rates are sorted first", {"for rate in rates]": "for rate in sorted(rates)]"}, AXES),
]  # fmt: skip

CASES = (
    Case(AXES, axes,
         "each direction is multiplied by 1 - rate * h in a step: for which h does that grow "
         "first?", points=2, teaching="one number for each direction, and no momentum"),
    Case(TURNED, turned,
         "the directions of a bowl are the eigenvectors of its matrix; a run whose start has no "
         "part in the steepest one misses it", use=each),
    Case(HEAVY, heavy,
         "write a step of x and v as a matrix of 2 x 2, or let it run: momentum moves the limit",
         points=2, teaching="momentum alone"),
    Case(DECAYED, decayed, "weight decay adds to the gradient what a steeper bowl would",
         teaching="decay alone"),
    Case(BOTH, both, "the decay is a part of the gradient that the momentum collects"),
    Case(FALLING, falling, "what falls in one direction grows in it, at any rate",
         teaching="a fall alone, before momentum and decay"),
    Case(HELD, held, "with the decay the bowl falls nowhere any more"),
    Case(ON, falling_on, "which directions fall says the smallest eigenvalue, decay included",
         use=each),
    Case(FLAT, flat,
         "in a flat direction x stays; an eigenvalue of 0 is computed as a number near it",
         use=each),
)  # fmt: skip

EXERCISE = Exercise(
    name="measure_rate", function="diverges", page="7_optimizers/1_adamw", minutes=20, difficulty=3,
    outcome="Say before a run, or by a short one, which learning rates diverge.",
    reference=diverges, cases=CASES, wrong=planted(WRONG),
    hints=(
        "One direction first: x is multiplied by the same factor in every step. When is that "
        "factor larger than 1 in size?",
        "A symmetric matrix is a bowl with n directions that do not mix; which of them diverges "
        "first? Where the factor of one is above 1 for every rate, nothing is left to compute.",
        "With momentum try numbers: take h = 1, let the rate grow, and note where it breaks for "
        "momentum 0, 0.5 and 0.9. The three limits lie on a line.",
    ),
)  # fmt: skip
