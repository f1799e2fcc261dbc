"""Bug hunt: queries and gates that are cut across the heads, and a gate on the query."""

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal


def reference(projected: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The lines of `GatedAttention` between its projections, without norms and rotation."""
    (B, T, _), (S, D) = projected.shape, k.shape[2:]
    q, gate = projected.reshape(B, T, -1, 2 * D).chunk(2, dim=-1)  # (B, T, H, D)
    places = torch.arange(S)[None]
    y = sdpa_attention(q.transpose(1, 2), k, v, Visibility(places[:, S - T :], places, dense=True))
    return (y.transpose(1, 2) * gate.sigmoid()).reshape(B, T, -1)


def inputs(
    g: Generator,
    heads: tuple[int, int] = (4, 4),
    tokens: tuple[int, int] = (5, 5),
    width: int = 6,
    gate: float | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Call:
    """Heads and key heads, queries and keys; a number for all gates, where one is given."""
    (H, Hkv), (T, S) = heads, tokens
    both = normal(g, 2, T, H, 2 * width, scale=scale, dtype=dtype)
    if gate is not None:
        both[..., width:] = gate
    k, v = (normal(g, 2, Hkv, S, width, dtype=dtype) for _ in range(2))
    return call(both.flatten(2), k, v)


def several(g: Generator) -> Call:
    return inputs(g)


# ------------------------------------------------------------------------------- wrong answers

SEVERAL, CLOSED, HALF = "four heads", "every gate closed", "every gate half open"
GROUPED, LAST = "6 heads, 2 key heads", "3 queries, the last of 7 tokens"
CUT = "projected.reshape(B, T, -1, 2 * D).transpose(1, 2).split(D, dim=3)"
GATED = "(y * gate.sigmoid())"
FOUND = "    return gated_heads_as_found(projected, k, v)\n"
HALVES = "(x.reshape(B, T, -1, D).transpose(1, 2) for x in projected.chunk(2, dim=-1))"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {"    (B, T, _), ": f"{FOUND}    (B, T, _), "}, CLOSED),
    ("the gate is where it belongs, but it is still cut across the heads", {CUT: HALVES}, SEVERAL),
    ("the heads are cut right, but the gate still multiplies the query",
     {"q @ k.mT": "(q * gate.sigmoid()) @ k.mT", GATED: "y"}, CLOSED),
    ("the gate multiplies both the query and the result",
     {"q @ k.mT": "(q * gate.sigmoid()) @ k.mT"}, HALF),
    ("gate and query are exchanged", {"q, gate =": "gate, q ="}, SEVERAL),
    ("query and gate take turns, feature by feature",
     {CUT: "projected.reshape(B, T, -1, D, 2).transpose(1, 2).unbind(4)"}, SEVERAL),
    ("heads and their halves are exchanged",
     {CUT: "projected.reshape(B, T, 2, -1, D).permute(0, 3, 1, 2, 4).unbind(3)"}, SEVERAL,
     "cutting across the heads is the same"),
    ("the gate multiplies the values that are read, not the result",
     {".softmax(3) @ v": ".softmax(3) @ (v * gate.sigmoid())", GATED: "y"}, SEVERAL),
    ("the gate multiplies the weights and not the result",
     {"softmax(3) @ v": "softmax(3) * gate.sigmoid().mean(3, keepdim=True) @ v", GATED: "y"},
     SEVERAL),
    ("the gate has no sigmoid", {GATED: "(y * gate)"}, HALF),
    ("the gate is a tanh", {"gate.sigmoid()": "gate.tanh()"}, HALF),
    ("the gate is a silu", {"gate.sigmoid()": "(gate * gate.sigmoid())"}, HALF),
    ("the gate is left out", {GATED: "y"}, CLOSED),
    ("1 is open and 0 is closed the other way round",
     {"gate.sigmoid()": "(1 - gate.sigmoid())"}, CLOSED),
    ("a gate is shared by the features of a head",
     {"gate.sigmoid()": "gate.mean(3, keepdim=True).sigmoid()"}, SEVERAL),
    ("the gates of a batch are those of its first row", {"gate.sigmoid()": "gate[:1].sigmoid()"},
     SEVERAL),
    ("the result is added to the gate", {GATED: "(y + gate.sigmoid())"}, HALF),
    ("heads that share a key head are taken in turns",
     {"k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)":
          "k.repeat(1, shared, 1, 1), v.repeat(1, shared, 1, 1)"}, GROUPED),
    ("the heads are not put side by side again",
     {".transpose(1, 2).reshape(B, T, -1)": ".reshape(B, T, -1)"}, SEVERAL),
    ("scores are divided by the root of the projected width, 2 D",
     {"math.sqrt(D)": "math.sqrt(2 * D)"}, HALF),
    ("nothing hides the future", {"scores.masked_fill(future, -torch.inf)": "scores"}, HALF),
    ("the triangle starts at the first key", {"triu(S - T + 1)": "triu(1)"}, LAST),
    ("the gate is detached", {"gate.sigmoid()": "gate.detach().sigmoid()"},
     "gradients of all three"),
]  # fmt: skip

CASES = (
    Case(SEVERAL, several,
         "the first 2 D numbers are query and gate of head 0, the next 2 D those of head 1",
         points=3, teaching="the first mistake"),
    Case(CLOSED, lambda g: inputs(g, (1, 1), gate=-100.0),
         "sigmoid(-100) is 0: whatever a head has read, nothing passes", points=2,
         teaching="the second mistake alone, with one head"),
    Case(HALF, lambda g: inputs(g, (3, 3), gate=0.0, scale=2.0),
         "sigmoid(0) is 1/2: the result is half of plain attention", points=2,
         teaching="one can compute it by hand"),
    Case(GROUPED, lambda g: inputs(g, (6, 2)), "heads 0, 1 and 2 share the first key head"),
    Case(LAST, lambda g: inputs(g, (2, 1), (3, 7), width=4),
         "the first query is token 4, so it sees 5 keys; its gate is its own",
         teaching="a chunk after a cache"),
    Case("one query after 5 tokens", lambda g: inputs(g, (2, 2), (1, 6)),
         "one query is an axis of size 1", teaching="decoding"),
    Case("float64", lambda g: inputs(g, (2, 2), dtype=torch.float64), "nothing becomes float32",
         teaching="more digits"),
    Case("gradients of all three", several, "nothing may be detached", gradient=True),
    Case("one head, every gate open", lambda g: inputs(g, (1, 1), gate=100.0),
         "with one head and open gates the code as found was right", guard=True,
         teaching="the code as found passes it: a test with one head shows nothing"),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_split_gate", function="gated_heads", page="9_since_qwen2/4_sinks_and_gates",
    minutes=20, difficulty=2,
    outcome="Cut a joint projection inside each head, and gate what a head has read.",
    reference=reference, hunt="M60, M61", cases=CASES, wrong=planted(WRONG),
    hints=(
        "Number the columns of `projected` from 0, for two heads of D = 2. Which of them are the "
        "gate of head 0, and which does the code take?",
        "There are two mistakes: where the projection is cut, and what the gate multiplies. With "
        "a closed gate the query is 0. What are the weights of a softmax of zeros?",
        "A head's query and its gate come out side by side. So the heads must have an axis of "
        "their own before anything is cut. And the gate works on what attention returns, not "
        "on what goes in.",
    ),
)  # fmt: skip
