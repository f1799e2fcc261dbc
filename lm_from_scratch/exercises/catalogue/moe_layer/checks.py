"""A layer of experts: what is chosen, what it weighs, and what is never computed."""

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.layers.experts import expert_sum, softmax_routing
from lm_from_scratch.layers.gated_mlp import PRODUCTS


def reference(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, k: int, normalize: bool
) -> Tensor:
    """The package's routing and its sum."""
    routing = softmax_routing(x @ router.T, k, normalize)
    return expert_sum(x, routing, gate_up, down, PRODUCTS["silu"])


def inputs(
    g: Generator,
    tokens: int = 6,
    sizes: tuple[int, int, int] = (8, 5, 4),
    k: int = 2,
    normalize: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Call:
    """N, then C, F and E."""
    C, F_, E = sizes
    return call(
        normal(g, tokens, C, dtype=dtype),
        normal(g, E, C, scale=0.5, dtype=dtype),
        normal(g, E, 2 * F_, C, scale=0.4, dtype=dtype),
        normal(g, E, C, F_, scale=0.4, dtype=dtype),
        k,
        normalize,
    )


def two_of_four(g: Generator) -> Call:
    return inputs(g)


def never_chosen(g: Generator) -> Call:
    """Half of the tokens choose the first two of six experts, which overflow for the other half.
    These choose the next two; the last two are NaN."""
    x, router, gate_up, down, k, normalize = inputs(g, sizes=(8, 5, 6)).args
    x, router = 1.0 + 0.05 * x, router * 0.1
    x[::2, 0], router[:2], router[2:4, 0] = 0.0, 0.5 + router[:2], 9.0
    gate_up[:2, :, 0] = 1e25
    gate_up[4:], down[4:] = torch.nan, torch.nan
    return call(x, router, gate_up, down, k, normalize)


def sure(g: Generator) -> Call:
    """Scores of hundreds: exponentials overflow."""
    x, router, *rest = inputs(g, normalize=False).args
    return call(x, router * 100, *rest)


# ------------------------------------------------------------------------------- wrong answers


PLAIN, RAW, FIRST = "the two best of four", "probabilities as they are", "one of seven"
ALL, UNUSED, HUGE = "all of three", "experts that nobody chooses", "scores of hundreds"
ONE = "one token"
PROBABILITIES = "(x @ router.T).softmax(1)"
TOP = "weights, experts = probabilities.topk(k)"
BY_EXPERT = {
    "y = torch.zeros_like(x)": "done = []",
    "y = y.index_add(0, token, said * weights[token, place, None])": "done.append(said)",
}
CUT = "(x[token] @ gate_up[e].T).chunk(2, 1)"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("weights are divided by their sum whatever is asked for", {"if normalize:": "if True:"}, RAW),
    ("weights are never divided by their sum", {"if normalize:": "if False:"}, PLAIN),
    ("weights are divided only when they are not to be", {"if normalize:": "if not normalize:"},
     PLAIN),
    ("the softmax runs over the chosen scores alone",
     {TOP: "top, experts = (x @ router.T).topk(k)\n    weights = top.softmax(1)"}, RAW,
     "a softmax of the chosen is the softmax of all, divided by their sum"),
    ("scores are weights, without a softmax", {PROBABILITIES: "x @ router.T"}, PLAIN),
    ("each score becomes a sigmoid", {".softmax(1)": ".sigmoid()"}, PLAIN),
    ("the softmax runs over the tokens", {".softmax(1)": ".softmax(0)"}, PLAIN),
    ("the worst experts are chosen",
     {"probabilities.topk(k)": "probabilities.topk(k, largest=False)"}, PLAIN),
    ("all experts are weighed", {"probabilities.topk(k)": "probabilities.topk(len(down))"}, PLAIN),
    ("only the best expert is asked", {"probabilities.topk(k)": "probabilities.topk(1)"}, PLAIN),
    ("chosen experts weigh alike",
     {TOP: "weights, experts = probabilities.topk(k)\n    weights = torch.ones_like(weights) / k"},
     PLAIN),
    ("gate and up are exchanged", {"gate, up =": "up, gate ="}, PLAIN),
    ("gate and up take turns, row by row",
     {CUT: "(x[token] @ gate_up[e].T).unflatten(1, (-1, 2)).unbind(2)"}, PLAIN),
    ("the gate has no silu", {"F.silu(gate)": "gate"}, PLAIN),
    ("silu is taken for a sigmoid", {"F.silu(gate)": "gate.sigmoid()"}, PLAIN),
    ("silu is applied to the product", {"F.silu(gate) * up": "F.silu(gate * up)"}, PLAIN),
    ("a later expert replaces what an earlier one said",
     {"y = y.index_add(0, token, said * weights[token, place, None])":
          "y = y.index_copy(0, token, said * weights[token, place, None])"}, PLAIN),
    ("the weight of the first choice is taken for every choice",
     {"weights[token, place, None]": "weights[token, 0, None]"}, PLAIN),
    ("weights are taken by place in the list of the expert, not by token",
     {"weights[token, place, None]": "weights[: len(token), :1]"}, PLAIN),
    ("the input of an expert is weighed, not its result",
     {"x[token] @": "(x[token] * weights[token, place, None]) @",
      "said * weights[token, place, None]": "said"}, PLAIN),
    ("results sorted by expert are taken for results by token",
     BY_EXPERT | {"return y": "return (torch.cat(done).unflatten(0, experts.shape) "
                  "* weights[..., None]).sum(1)"}, PLAIN),
    ("results are sorted a second time, and not back",
     BY_EXPERT | {"return y": "done = torch.cat(done)[experts.flatten().argsort(stable=True)]\n"
     "    return (done.unflatten(0, experts.shape) * weights[..., None]).sum(1)"}, PLAIN),
    ("an expert that only token 0 chose is taken for one that nobody chose",
     {"gate, up =": "if not token.any():\n            continue\n        gate, up ="}, ONE),
    ("an expert has room for its fair share of the visits, and drops the others",
     {"gate, up =": "room = max(1, len(x) * k // len(down))\n"
      "        token, place = token[:room], place[:room]\n        gate, up ="}, UNUSED),
    ("a second softmax instead of a division by the sum",
     {"weights / weights.sum(1, keepdim=True)": "weights.softmax(1)"}, PLAIN),
    ("weights are divided by the sum over the tokens",
     {"weights.sum(1, keepdim=True)": "weights.sum(0, keepdim=True)"}, PLAIN),
    ("weights are divided by k, not by their sum",
     {"weights / weights.sum(1, keepdim=True)": "weights / k"}, PLAIN),
    ("a view of weights that are not contiguous",
     {"    probabilities =": "    gate_up.view(-1, x.shape[1])\n    probabilities ="}, PLAIN),
    ("every expert computes every token, and most results are thrown away",
     {"token, place = (experts == e).nonzero(as_tuple=True)": "token = torch.arange(len(x))",
      "weights[token, place, None]": "(weights * (experts == e)).sum(1, keepdim=True)"}, UNUSED,
     "its results are NaN or equal to the right ones, and all NaN look alike"),
    ("exponentials without the maximum subtracted",
     {PROBABILITIES: "(x @ router.T).exp()\n"
      "    probabilities = probabilities / probabilities.sum(1, keepdim=True)"}, HUGE,
     "its results are NaN or equal to the right ones, and all NaN look alike"),
    ("float64 is routed in float32", {PROBABILITIES:
     "(x @ router.T).float().softmax(1).to(x.dtype)"}, "float64 keeps its digits"),
    ("weights are detached", {"probabilities.topk(k)": "probabilities.detach().topk(k)"},
     "gradients of all four"),
]  # fmt: skip

CASES = (
    Case(PLAIN, two_of_four,
         "softmax, then the k best, then the division by their sum; gate first, then up", points=3,
         teaching="the formula, and the first thing to read"),
    Case(RAW, lambda g: inputs(g, normalize=False),
         "with `normalize` off the weights sum to less than 1", points=2,
         teaching="DeepSeek-V2's and Qwen3's switch"),
    Case(FIRST, lambda g: inputs(g, sizes=(6, 9, 7), k=1, normalize=False),
         "a single weight is a probability below 1, and is not 1",
         teaching="top-1, as in Switch Transformers"),
    Case(ALL, lambda g: inputs(g, sizes=(5, 5, 3), k=3), "each expert has all tokens",
         teaching="nothing is left out, so the order of the sum is all that matters"),
    Case(ONE, lambda g: inputs(g, tokens=1), "one token is an axis of size 1, and its number is 0"),
    Case(UNUSED, never_chosen, "0 times NaN is NaN: multiply only for tokens that chose the expert",
         points=2, gradient=True),
    Case(HUGE, sure, "softmax subtracts the largest score first"),
    Case("float64 keeps its digits", lambda g: inputs(g, dtype=torch.float64),
         "nothing becomes float32"),
    Case("gradients of all four", two_of_four, "the router learns by the weights", gradient=True,
         teaching="what training needs, where no expert is left out"),
)  # fmt: skip

EXERCISE = Exercise(
    name="moe_layer", function="moe_layer", page="9_since_qwen2/2_mixture_of_experts", minutes=30,
    difficulty=2,
    outcome="Write a layer of experts that computes no more than what its router has chosen.",
    reference=reference, after=("swiglu",), cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write it for one token first: its scores, its k experts, a sum of k terms.",
        "Turn the loops round: for each expert, `(experts == e).nonzero(as_tuple=True)` has the "
        "tokens that chose it, and at which of their k places.",
        "For one expert, `torch.where` gives the tokens and the place among their choices. Its "
        "rows are few; a function of torch adds rows to chosen rows of another tensor. What if "
        "an expert has no token?",
    ),
)  # fmt: skip
