"""Bug hunt: the correction bias weighs what it should only choose, and 0 is no closed door."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.layers.experts import sigmoid_routing


def reference(
    logits: Tensor, bias: Tensor, k: int, n_group: int, top_group: int, scale: float
) -> Tensor:
    """The package's routing, spread over all experts."""
    routing = sigmoid_routing(
        logits, bias.detach(), k, scale=scale, n_group=n_group, top_group=top_group
    )
    return torch.zeros_like(logits).scatter(-1, routing.experts, routing.weights)


def given(
    g: Generator,
    bias: Tensor,
    k: int = 2,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    tokens: int = 12,
    dtype: torch.dtype = torch.float32,
) -> Call:
    """Logits for as many experts as there are biases."""
    logits = normal(g, tokens, len(bias), scale=2.0, dtype=dtype)
    return call(logits, bias.to(dtype), k, *groups, scale)


def moved(g: Generator) -> Call:
    return given(g, normal(g, 8, scale=0.3), k=3)


def negative(g: Generator) -> Call:
    """The best sum of a token is below 0, so a closed expert that counts 0 is better."""
    return given(g, -3.0 + normal(g, 12, scale=0.3), k=4, groups=(3, 2))


def far_below(g: Generator) -> Call:
    """No finite number that stands for a closed expert is below these sums, bar the lowest."""
    return given(g, -1e30 * (1 + torch.rand(12, generator=g)), k=4, groups=(3, 2))


def two_of_a_group(g: Generator) -> Call:
    """One group has the best expert and bad ones, another has two good ones. The best expert's bias
    alone is more than either of them has."""
    logits = torch.cat([torch.tensor([4.0, -6.0, -6.0]), torch.tensor([1.0, 1.5, -6.0])])
    logits = logits + 0.1 * normal(g, 6, 6)
    bias = torch.tensor([1.2, -1.2, -1.2, 0.0, 0.0, 0.0]) + 0.01 * normal(g, 6)
    return call(logits, bias, 2, 2, 1, 1.0)


def third_of_a_group(g: Generator) -> Call:
    """One group has two good experts, another has three of middling worth; three are chosen."""
    logits = torch.cat([torch.tensor([2.0, 2.0, -2.0]), torch.tensor([0.8, 0.8, 0.8])])
    logits = logits + 0.1 * normal(g, 6, 6)
    return call(logits, 0.01 * normal(g, 6), 3, 2, 1, 1.0)


def large(g: Generator) -> Call:
    """A bias that decides alone: what it chooses has the smallest scores there are."""
    bias = torch.zeros(8)
    bias[2], bias[5] = 50.0, 40.0
    logits = normal(g, 12, 8)
    logits[:, [2, 5]] = -20 + 8 * torch.rand(12, 2, generator=g)
    return call(logits, bias, 2, 1, 1, 1.0)


def with_gradient(function: Callable[..., Tensor], logits: Tensor, *rest: Any) -> Any:
    """The gradient that reaches the logits."""
    logits = logits.detach().requires_grad_()
    weights = function(logits, *rest)
    upstream = torch.arange(1.0, 1 + weights.numel()).view_as(weights)
    return torch.autograd.grad((weights * upstream).sum(), logits)[0]


# ------------------------------------------------------------------------------- wrong answers

CHOICE, FRESH, BELOW = "biases that have moved", "a fresh router", "all biases below 0"
FAR = "all biases far below 0"
GROUPS, SECOND, THIRD = "open groups", "a group is worth two experts", "the third does not count"
GATHER = "weights = scores.gather(1, experts)"
SHARE = "weights / weights.sum(1, keepdim=True)"
WORTH = "worth = groups.topk(2).values.sum(2)"
FOUND = "    return expert_weights_as_found(logits, bias, k, n_group, top_group, scale)\n"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {"    scores = logits.sigmoid()": f"{FOUND}    scores = logits"}, CHOICE),
    ("the choice has its groups right, but weights still have the bias",
     {GATHER: "weights = sums.gather(1, experts)"}, CHOICE),
    ("weights have no bias, but closed groups still count 0", {"-torch.inf": "0.0"}, BELOW),
    ("closed groups count -1", {"-torch.inf": "-1.0"}, BELOW,
     "where all sums are below -1 it chooses what 0 would"),
    ("closed groups count -10,000, which a bias may be below", {"-torch.inf": "-1e4"}, FAR),
    ("a closed expert's score is 0, but its bias still counts",
     {"groups.masked_fill(closed[..., None], -torch.inf).flatten(1)":
      "(scores.unflatten(1, (n_group, -1)) * ~closed[..., None]).flatten(1) + bias"}, SECOND),
    ("the bias is left out of the choice, too", {"(scores + bias)": "scores"}, CHOICE),
    ("the bias is added to the logits", {"(scores + bias)": "(logits + bias).sigmoid()"}, CHOICE),
    ("the bias is subtracted", {"(scores + bias)": "(scores - bias)"}, CHOICE),
    ("groups are judged without the bias",
     {WORTH: "worth = scores.unflatten(1, (n_group, -1)).topk(2).values.sum(2)"}, GROUPS),
    ("a group is worth its best expert", {WORTH: "worth = groups.amax(-1)"}, SECOND),
    ("a group is worth the sum of all its experts", {WORTH: "worth = groups.sum(-1)"}, THIRD),
    ("a group is worth as many experts as are chosen",
     {WORTH: "worth = groups.topk(min(k, groups.shape[2])).values.sum(2)"}, THIRD),
    ("every group is open", {"closed[..., None]": "closed[..., None] & False"}, SECOND),
    ("experts of a group are n_group apart, not side by side",
     {"unflatten(1, (n_group, -1))": "unflatten(1, (-1, n_group)).mT",
      ".flatten(1)": ".mT.flatten(1)"}, GROUPS),
    ("weights are divided by the sum over all experts",
     {SHARE: "weights / scores.sum(1, keepdim=True)"}, FRESH),
    ("weights are a softmax of the chosen logits",
     {GATHER: "weights = logits.gather(1, experts).softmax(1)"}, FRESH),
    ("weights are not divided by their sum", {SHARE: "weights"}, FRESH),
    ("the scale is lost", {" * scale": ""}, FRESH),
    ("the scale is applied before the weights are divided by their sum",
     {GATHER: "weights = scale * scores.gather(1, experts)", " * scale\n": "\n"}, FRESH,
     "dividing by the sum undoes it, as if the scale were lost"),
    ("the router scores by softmax", {"logits.sigmoid()": "logits.softmax(-1)"}, FRESH),
    ("the bias decides, so chosen experts weigh alike",
     {GATHER: "weights = torch.ones_like(sums.gather(1, experts))"}, FRESH),
    ("one expert too few", {"sums.topk(k)": "sums.topk(max(k - 1, 1))"}, FRESH),
    ("no gradient reaches the logits", {"scores = logits.sigmoid()":
     "scores = logits.sigmoid().detach()"}, "gradients of the logits"),
]  # fmt: skip

CASES = (
    Case(CHOICE, moved, "gather the weights from the sigmoids, without the bias", points=2,
         teaching="the first mistake, alone: one group"),
    Case(BELOW, negative, "all sums are below 0: a closed expert that counts 0 is the best of all",
         points=2, teaching="the second mistake, at sums that one can read"),
    Case(FAR, far_below,
         "biases of -1e30 and less: a closed expert must be below any number, so -inf"),
    Case(GROUPS, lambda g: given(g, normal(g, 16, scale=0.5), k=3, groups=(4, 2), scale=2.5),
         "4 groups of 4 experts, 2 open: groups are judged by sums with the bias", points=2,
         teaching="both together, with a scale"),
    Case(SECOND, two_of_a_group,
         "the best expert of all is in a closed group: the other group's two are worth more",
         teaching="one group is better by its best expert, the other by its two best"),
    Case(THIRD, third_of_a_group, "three middling experts are worth less than two good ones",
         teaching="the other side of the same rule"),
    Case("a bias that decides alone", large,
         "biases of 50 and 40 choose; the weights come from the smallest scores there are",
         teaching="the first mistake at its largest"),
    Case("one expert for each token", lambda g: given(g, normal(g, 8, scale=0.3), k=1, scale=2.0),
         "the weight of a single expert is the scale",
         teaching="weights that say nothing but the choice"),
    Case("float64", lambda g: given(g, normal(g, 8, scale=0.3), k=3, dtype=torch.float64),
         "nothing becomes float32", teaching="more digits"),
    Case("gradients of the logits", moved,
         "the weights must have a gradient; the choice has none, and the bias gets none",
         use=with_gradient),
    Case(FRESH, lambda g: given(g, torch.zeros(8), k=3, groups=(4, 2), scale=1.5),
         "with biases of 0 the code as found was right", guard=True,
         teaching="the code as found passes it: this is why a fresh model shows nothing"),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_expert_bias", function="expert_weights", page="9_since_qwen2/2_mixture_of_experts",
    minutes=20, difficulty=2,
    outcome="Keep what chooses experts apart from what weighs them, and close a group for good.",
    reference=reference, hunt="M48, M49", cases=CASES, wrong=planted(WRONG),
    hints=(
        "Set the biases to 0.3, 0.3, ...: the same for all. Which numbers of the result should "
        "change, and which do?",
        "There are two mistakes. One variable holds what is compared *and* what is returned. And "
        "an expert that must not be chosen is worth 0: is that less than all others?",
        "Two tensors have the same shape: one says who is chosen, the other how much each "
        "counts. Where do they part, and which of the two may the bias touch? A closed group "
        "must lose against any bias.",
    ),
)  # fmt: skip
