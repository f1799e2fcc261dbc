"""Attention with a sink: a score that is no key, has no value, and no window hides."""

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.sinks import formula_sink_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal


def reference(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None = None) -> Tensor:
    """The package's formula."""
    T, S = q.shape[2], k.shape[2]
    places = torch.arange(S)[None]
    seen = Visibility(places[:, S - T :], places, window=window, dense=True)
    return formula_sink_attention(q, k, v, seen, sinks)


def inputs(
    g: Generator,
    heads: tuple[int, int] = (3, 3),
    tokens: tuple[int, int] = (5, 5),
    sink: float | None = None,
    window: int | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Call:
    """Heads and key heads, queries and keys; one sink for all heads, where one is given."""
    (H, Hkv), (T, S) = heads, tokens
    q = normal(g, 2, H, T, 8, scale=scale, dtype=dtype)
    k, v = normal(g, 2, Hkv, S, 8, scale=scale, dtype=dtype), normal(g, 2, Hkv, S, 8, dtype=dtype)
    sinks = normal(g, H, dtype=dtype)
    return call(q, k, v, sinks if sink is None else torch.full_like(sinks, sink), window)


def zeros(g: Generator) -> Call:
    """All scores are 0, and so is the sink: the first query spends half of its weight on it."""
    q, k, v, sinks, _ = inputs(g, sink=0.0).args
    return call(0 * q, k, v, sinks)


def different(g: Generator) -> Call:
    q, k, v, sinks, _ = inputs(g).args
    return call(q, k, v, sinks + torch.tensor([-2.0, 0.0, 2.0]))


def shared(g: Generator) -> Call:
    q, k, v, sinks, _ = inputs(g, (6, 2)).args
    return call(q, k, v, sinks + torch.arange(-3.0, 3.0))


def takes_all(g: Generator) -> Call:
    """The sinks of 300 and 0 beside small scores, that of -300 beside scores near -300."""
    q, k, v, _, _ = inputs(g).args
    far = (300 / q.shape[-1] ** 0.5) ** 0.5
    q[:, 2], k[:, 2] = 0.05 * q[:, 2] - far, 0.05 * k[:, 2] + far
    return call(q, k, v, torch.tensor([300.0, 0.0, -300.0]))


def huge(g: Generator) -> Call:
    q, k, v, sinks, _ = inputs(g, scale=12).args
    return call(q, k, v, sinks + torch.tensor([100.0, 150.0, 200.0]))


# ------------------------------------------------------------------------------- wrong answers

ZEROS, HEADS = "all scores 0, and the sink too", "a sink for each head"
SHARED = "6 heads, 2 key heads"
WINDOW, CHUNK, NONE = "a window of 3", "a chunk and a window", "a sink of minus infinity"
ALL, HUGE = "sinks of 300, 0 and -300", "scores and sinks of hundreds"
WEIGHTS = "torch.cat([sink, scores], 3).softmax(3)[..., 1:]"
SINK = "sinks.view(H, 1, 1).expand(B, H, T, 1)"
FILL = "scores = scores.masked_fill(hidden, -torch.inf)"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the sink is left out", {WEIGHTS: "scores.softmax(3)"}, ZEROS),
    ("the sink's own weight stays in, and the weights are divided by the rest",
     {WEIGHTS: "torch.cat([sink, scores], 3).softmax(3)[..., 1:]\n"
      "    weights = weights / weights.sum(3, keepdim=True)",
      "return torch": "weights = torch", " @ v": "\n    return weights @ v"}, ZEROS),
    ("a window of 1 is taken for none",
     {"if window is not None:": "if window is not None and window > 1:"},
     "one query after 5 tokens"),
    ("no sink is below -30, as if that were far enough",
     {SINK: "sinks.clamp(min=-30).view(H, 1, 1).expand(B, H, T, 1)"}, ALL),
    ("the sink is divided by the root of D", {SINK: f"{SINK} / math.sqrt(D)"}, HEADS),
    ("the sink is a number in the sum, not a score",
     {WEIGHTS: "(scores.exp() / (sink + scores.exp().sum(3, keepdim=True)))"}, ZEROS),
    ("the sink is 1 in the sum, whatever was learned",
     {"sinks.view(H, 1, 1)": "(0 * sinks).view(H, 1, 1)"}, HEADS),
    ("all heads have the sink of the first",
     {"sinks.view(H, 1, 1)": "sinks[:1].view(1, 1, 1)"}, HEADS),
    ("the sink is subtracted from every score", {WEIGHTS: "(scores - sink).softmax(3)"}, ZEROS),
    ("the sink is added to every score before the largest is taken",
     {WEIGHTS: "torch.cat([sink, scores + sink], 3).softmax(3)[..., 1:]"}, HEADS,
     "what all scores share falls out, so that the sink is 1 in the sum"),
    ("the sink's weight is the last column, and the last key's is thrown away",
     {WEIGHTS: "torch.cat([sink, scores], 3).softmax(3)[..., :-1]"}, ZEROS),
    ("the sink has the sign of a penalty", {"[sink, scores]": "[-sink, scores]"}, HEADS),
    ("the sink's weight goes to the first token",
     {WEIGHTS: "torch.cat([sink, scores], 3).softmax(3)",
      " @ v": " @ torch.cat([v[:, :, :1], v], 2)"}, ZEROS),
    ("key heads are taken in turns", {"k.repeat_interleave(H // Hkv, 1), v.repeat_interleave"
     "(H // Hkv, 1)": "k.repeat(1, H // Hkv, 1, 1), v.repeat(1, H // Hkv, 1, 1)"}, SHARED),
    ("there is a sink for each key head", {"sinks.view(H, 1, 1)":
     "sinks[:Hkv].repeat_interleave(H // Hkv).view(H, 1, 1)"}, SHARED),
    ("the window is forgotten", {"if window is not None:": "if False:"}, WINDOW),
    ("a window of W sees W keys before the query's own",
     {"distance >= window": "distance > window"}, WINDOW),
    ("the window is counted from the other side", {"distance >= window": "distance < -window"},
     WINDOW, "nothing is that far ahead, so it is as if the window were forgotten"),
    ("the triangle starts at the first key",
     {"torch.arange(S - T, S)[:, None]": "torch.arange(T)[:, None]"}, CHUNK),
    ("nothing hides the future", {"hidden = distance < 0": "hidden = distance < -S"}, ZEROS),
    ("hidden scores are 0, a score like any other", {FILL:
     "scores = scores.masked_fill(hidden, 0.0)"}, ZEROS),
    ("a window hides the sink as well, as if it were the first token",
     {SINK: f"{SINK}.masked_fill(hidden[:, :1], -torch.inf)"}, WINDOW),
    ("exponentials without the largest subtracted",
     {WEIGHTS: "(scores.exp() / (sink.exp() + scores.exp().sum(3, keepdim=True)))"}, HUGE,
     "its results are NaN or equal to the right ones, and all NaN look alike"),
    ("scores are divided by D", {"math.sqrt(D)": "D"}, HEADS),
    ("float64 is computed in float32", {"q @ k.mT": "(q.float() @ k.float().mT).to(q.dtype)"},
     "float64 keeps its digits"),
    ("the sinks learn nothing", {"sinks.view": "sinks.detach().view"}, "gradients of all four"),
]  # fmt: skip

CASES = (
    Case(ZEROS, zeros,
         "e^0 = 1: the first query gives its key 1/2, the last gives each of five keys 1/6",
         points=3, teaching="one can compute it by hand"),
    Case(HEADS, different, "the sink of a head is beside scores that are divided already",
         points=2, teaching="sinks that differ"),
    Case(SHARED, shared, "sinks belong to query heads, and keys are shared by three of them"),
    Case(WINDOW, lambda g: inputs(g, tokens=(7, 7), window=3),
         "the window hides keys; the sink is no key", points=2,
         teaching="the window alone, with a query for every token"),
    Case(CHUNK, lambda g: inputs(g, tokens=(3, 9), window=4),
         "the first query is token 6: it sees tokens 3 to 6, and the sink",
         teaching="both corners of the mask at once"),
    Case("one query after 5 tokens", lambda g: inputs(g, tokens=(1, 6), window=1),
         "one query is an axis of size 1; with a window of 1 it sees itself and the sink"),
    Case(NONE, lambda g: inputs(g, sink=-torch.inf), "e to minus infinity is 0: plain attention",
         teaching="the case that one knows"),
    Case(ALL, takes_all,
         "the first sink takes everything; the last has a share, as its scores are near -300",
         tolerance=(5e-4, 5e-4)),
    Case(HUGE, huge,
         "exp(89) is above the largest float32: subtract the largest of scores *and* sink",
         teaching="large numbers everywhere, not at one end", tolerance=(5e-4, 5e-3)),
    Case("float64 keeps its digits", lambda g: inputs(g, dtype=torch.float64),
         "nothing becomes float32"),
    Case("gradients of all four", different, "nothing may be detached", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="sink_attention", function="sink_attention", page="9_since_qwen2/4_sinks_and_gates",
    minutes=25, difficulty=2,
    outcome="Give a softmax somewhere to put the weight that no key deserves.",
    reference=reference, after=("attention",), cases=CASES, wrong=planted(WRONG),
    hints=(
        "The sum below the line has one term more. What would a softmax have to see for that?",
        "Put the sink beside the scores as one more column, (B, H, T, S + 1), after the mask.",
        "The sink is one more column of scores, the same for every query of a head. It takes "
        "its share in the softmax; which column must be gone before the weights meet the "
        "values?",
    ),
)  # fmt: skip
