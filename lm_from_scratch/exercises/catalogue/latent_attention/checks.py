"""Latent attention with both matrices absorbed: the root, the layout of the weight, and no key."""

from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lm_from_scratch.attention.latent import absorbed
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal


def reference(q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor) -> Tensor:
    """The package's function, whose latents have an axis for their one head."""
    T, S = q.shape[2], latent.shape[1]
    places = torch.arange(S)[None]
    seen = Visibility(places[:, S - T :], places, dense=True)
    one = latent[:, None], shared[:, None]
    return absorbed(q, *one, weight.contiguous(), seen, sdpa_attention)


def inputs(
    g: Generator,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    widths: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Call:
    """A batch and heads, queries and keys, R, Dn, Dr and Dv."""
    (B, H), (T, S), (R, Dn, Dr, Dv) = heads, sizes, widths
    return call(
        normal(g, B, H, T, Dn + Dr, scale=scale, dtype=dtype),
        normal(g, B, S, R, scale=scale, dtype=dtype),
        normal(g, B, S, Dr, scale=scale, dtype=dtype),
        normal(g, H * (Dn + Dv), R, dtype=dtype),
    )


def square(g: Generator) -> Call:
    return inputs(g, (2, 3), (5, 5), (8, 6, 4, 6))


def widths(g: Generator) -> Call:
    return inputs(g, (2, 3), (5, 5), (11, 6, 4, 9))


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is made; views are not made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for y in made if isinstance(made, tuple | list) else [made]:
            if isinstance(y, Tensor):
                numbers = y.untyped_storage().nbytes() // y.element_size()
                self.numbers = max(self.numbers, numbers)
        return made


def watched(function: Any, q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor) -> Any:
    """The result, and whether a tensor was larger than latents and turned keys together."""
    with torch.no_grad(), Largest() as largest:
        y = function(q, latent, shared, weight)
    few = largest.numbers <= latent.numel() + shared.numel()
    return {"the result": y, "no tensor is larger than the cache": few}


# ------------------------------------------------------------------------------- wrong answers


def expands(q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor) -> Tensor:
    (B, H, T, D), (S, _), Dr = q.shape, latent.shape[1:], shared.shape[2]
    kv = (latent @ weight.T).unflatten(2, (H, -1)).transpose(1, 2)
    k = torch.cat([kv[..., : D - Dr], shared[:, None].expand(B, H, S, Dr)], dim=-1)
    scores = (q @ k.mT / D**0.5).masked_fill(torch.ones(T, S).triu(S - T + 1).bool(), -torch.inf)
    return scores.softmax(-1) @ kv[..., D - Dr :]


SPLIT = "w_k, w_v = w[:, :Dn], w[:, Dn:]"
FILL = "scores.masked_fill(future, -torch.inf).softmax(-1)"
PLAIN, LAST = "as many queries as keys", "3 queries, the last of 7 tokens"
DIFFER, NO_KEY = "four different widths", "300 tokens, and no key is made"
#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("divided by the root of the absorbed width, R + Dr",
     {"math.sqrt(D)": "math.sqrt(keys.shape[-1])"}, PLAIN),
    ("divided by the root of Dn, without the turned features", {"math.sqrt(D)": "math.sqrt(Dn)"},
     PLAIN),
    ("no root at all", {" / math.sqrt(D)": ""}, PLAIN),
    ("the turned key is left out", {"q[..., Dn:]], dim=-1)": "0 * q[..., Dn:]], dim=-1)"}, PLAIN),
    ("the first features of a query are taken for the turned ones",
     {"[q[..., :Dn] @ w_k, q[..., Dn:]]": "[q[..., D - Dn :] @ w_k, q[..., : D - Dn]]"}, PLAIN),
    ("the matrices of keys and values are exchanged",
     {SPLIT: "w_v, w_k = w[:, :-Dn], w[:, -Dn:]"}, PLAIN),
    ("the rows of the weight are taken as all keys first, then all values",
     {SPLIT: "w_k, w_v = weight[: H * Dn].reshape(H, Dn, R), weight[H * Dn :].reshape(H, -1, R)"},
     PLAIN),
    ("the rows of the weight are taken as one of each head in turn",
     {"weight.reshape(H, -1, R)": "weight.reshape(-1, H, R).transpose(0, 1)"}, PLAIN),
    ("every head has the matrices of the first", {SPLIT: "w_k, w_v = w[:1, :Dn], w[:1, Dn:]"},
     PLAIN),
    ("values are as wide as unturned keys", {SPLIT: "w_k, w_v = w[:, :Dn], w[:, -Dn:]"}, DIFFER),
    ("nothing hides the future", {FILL: "scores.softmax(-1)"}, PLAIN),
    ("the triangle starts at the first key", {"triu(S - T + 1)": "triu(1)"}, LAST),
    ("a query does not see its own token", {"triu(S - T + 1)": "triu(S - T)"}, LAST),
    ("hidden scores are 0, a score like any other", {"-torch.inf": "0.0"}, PLAIN),
    ("the softmax runs over the queries", {".softmax(-1)": ".softmax(-2)"}, PLAIN),
    ("exponentials without the maximum subtracted",
     {FILL: "scores.masked_fill(future, -torch.inf).exp()\n"
      "    weights = weights / weights.sum(-1, keepdim=True)"}, "scores of hundreds",
     "its results are NaN or equal to the right ones, and all NaN look alike"),
    ("squeeze removes the axis of a single query",
     {"mean @ w_v.mT": "(mean @ w_v.mT).squeeze()"}, "one query after 5 tokens"),
    ("float64 is computed in float32",
     {"wide.flatten(1, 2) @ keys.mT / math.sqrt(D)":
          "(wide.flatten(1, 2).float() @ keys.float().mT).to(q.dtype) / math.sqrt(D)"},
     "float64 keeps its digits"),
    ("keys and values of every head are made", expands, NO_KEY),
    ("the latents are copied for every head by a product that broadcasts",
     {"(wide.flatten(1, 2) @ keys.mT / math.sqrt(D)).view(B, H, T, S)":
          "wide @ keys[:, None].mT / math.sqrt(D)"},
     NO_KEY, "its results are right; it differs from other answers in its copies alone"),
    ("a view of queries that are not contiguous",
     {"    S, R = latent": "    q.view(B, H * T, D)\n    S, R = latent"},
     PLAIN),
    ("the weights are detached", {"weights.flatten": "weights.detach().flatten"},
     "gradients of all four"),
]  # fmt: skip

CASES = (
    Case(PLAIN, square,
         "w_k of a head is (Dn, R): q @ w_k is a query for latents; the root is of Dn + Dr",
         points=3, teaching="the plain formula, and the first thing to read"),
    Case(DIFFER, widths,
         "of each head's rows the first Dn are for keys and *all others* for values", points=2,
         teaching="a wrong width says which one is meant"),
    Case(LAST, lambda g: inputs(g, (2, 3), (3, 7), (8, 6, 4, 5)),
         "the first query is token 4: it sees 5 latents, and the last sees all 7", points=2,
         teaching="the corner of the mask, with nothing else new"),
    Case("one query after 5 tokens", lambda g: inputs(g, (2, 3), (1, 6), (8, 6, 4, 5)),
         "one query is an axis of size 1, which stays",
         teaching="decoding, with a shape that one can read"),
    Case(NO_KEY, lambda g: inputs(g, (2, 8), (1, 300), (16, 24, 4, 22)),
         "fold the heads into the queries, (B, H * T, R + Dr), before they meet the latents",
         points=2, use=watched, tolerance=(1e-4, 1e-4)),
    Case("scores of hundreds", lambda g: inputs(g, (2, 3), (5, 5), (8, 6, 4, 5), scale=12),
         "exp(89) is above the largest float32: a softmax subtracts the largest score first",
         tolerance=(5e-4, 5e-3)),
    Case("float64 keeps its digits",
         lambda g: inputs(g, (2, 3), (5, 5), (8, 6, 4, 5), torch.float64),
         "nothing becomes float32"),
    Case("gradients of all four", square, "nothing may be detached", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="latent_attention", function="latent_attention", page="9_since_qwen2/3_latent_attention",
    minutes=35, difficulty=2,
    outcome="Write latent attention with both matrices absorbed, so that decoding makes no key.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write the score of one query and one token, and move the brackets: W_K is between "
        "the query and the latent.",
        "`weight.reshape(H, -1, R)` has the rows of a head together. Multiply `q[..., :Dn]` by "
        "its first Dn rows, and join the rest of q to it; latents and turned keys are joined too.",
        "Bring the query into the space of the latents, and the scores of all heads are one "
        "product with the latents themselves. After the softmax the mean is one of latents; "
        "only then does each head make its values.",
    ),
)  # fmt: skip
