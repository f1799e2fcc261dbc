"""A sparse autoencoder: what is active, what the loss is a share of, what has length 1."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.inside.dictionary import Dictionary

Parts = dict[str, Tensor]
NAMES = ("encoder", "threshold", "directions", "centre")


def reference(x: Tensor, parts: Parts, k: int, lr: float) -> Parts:
    """The package's dictionary with these parts, and torch's gradient descent."""
    found = Dictionary(x.shape[1], len(parts["threshold"]), k).to(x)
    for name in NAMES:
        getattr(found, name).data.copy_(parts[name])
    optimizer = torch.optim.SGD(found.parameters(), lr=lr)
    features = found.encode(x).detach()
    loss = (found(x) - x).square().mean() / (x - x.mean(0)).square().mean()
    loss.backward()
    optimizer.step()
    found.directions.data.copy_(F.normalize(found.directions.data, dim=-1))
    return {
        "features": features,
        "loss": loss.detach(),
        **{name: getattr(found, name).detach() for name in NAMES},
    }


# ------------------------------------------------------------------------------------- arguments


def given(
    g: Generator,
    k: int = 3,
    N: int = 12,
    low: float = 0.0,
    far: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Call:
    """States whose mean is not 0, and an encoder that is not the transposed directions."""
    C, n_features = 5, 9
    x = normal(g, N, C, dtype=dtype) + far * normal(g, C, dtype=dtype)
    directions = F.normalize(normal(g, n_features, C, dtype=dtype), dim=-1)
    parts = {
        "encoder": directions.mT + normal(g, C, n_features, scale=0.3, dtype=dtype),
        "threshold": normal(g, n_features, scale=0.3, dtype=dtype) - low,
        "directions": directions,
        "centre": normal(g, C, scale=0.5, dtype=dtype),
    }
    return call(x, parts, k, 0.5)


def active(function: Any, *args: Any) -> dict[str, Tensor]:
    return {"features": function(*args)["features"]}


def lost(function: Any, *args: Any) -> dict[str, Tensor]:
    return {"loss": function(*args)["loss"]}


def encoder(function: Any, *args: Any) -> Parts:
    after = function(*args)
    return {name: after[name] for name in ("encoder", "threshold", "centre")}


def lengths(function: Any, *args: Any) -> Parts:
    directions = function(*args)["directions"]
    return {"lengths of the directions": directions.norm(dim=-1), "directions": directions}


def two_steps(function: Any, x: Tensor, parts: Parts, k: int, lr: float) -> dict[str, Any]:
    """The parts of the first step go into the second; whether anything requires a gradient."""
    first = function(x, parts, k, lr)
    after = function(x, {name: first[name] for name in NAMES}, k, lr)
    return {
        **after,
        "a result requires a gradient": any(value.requires_grad for value in after.values()),
        "a given part requires a gradient": any(part.requires_grad for part in parts.values()),
    }


# ------------------------------------------------------------------------------- wrong answers

ACTIVE, FEW, ALL, LOSS, FAR = "the features", "fewer than k", "k is F", "the loss", "a far mean"
ENCODER, DIRECTIONS = "encoder, threshold, centre", "directions of length 1"
TWO, DOUBLE = "two steps", "float64"

SCORES = '(x - p["centre"]) @ p["encoder"] + p["threshold"]'
KEEP = "values, which = scores.relu().topk(k, dim=-1)"
FEATURES = "features = torch.zeros_like(scores).scatter(-1, which, values)"
ERROR, SPREAD = 'features @ p["directions"] + p["centre"] - x', "x - x.mean(dim=0)"
LOSS_IS = "error.square().sum() / spread.square().sum()"
NEW, LENGTH = "part.detach() - lr * part.grad", 'new["directions"].norm(dim=-1, keepdim=True)'
DIVIDE, RETURN = 'new["directions"] = new["directions"] / length', "return new |"
GIVEN = "p = {name: part.clone().requires_grad_() for name, part in parts.items()}"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the k largest by size, whatever their sign",
     {KEEP: "which = scores.abs().topk(k, dim=-1).indices\n    "
      "values = scores.gather(-1, which)"}, ACTIVE),
    ("the k largest by size, and then the negative ones are cut off",
     {KEEP: "which = scores.abs().topk(k, dim=-1).indices\n    "
      "values = scores.gather(-1, which).relu()"}, ACTIVE),
    ("no ReLU: numbers below 0 are active where there are too few above",
     {"scores.relu().topk": "scores.topk"}, FEW),
    ("all features above 0 are active", {FEATURES: "features = scores.relu()"}, ACTIVE),
    ("the k smallest are kept", {"topk(k, dim=-1)": "topk(k, dim=-1, largest=False)"}, ACTIVE),
    ("k features are left out, not kept",
     {FEATURES: "features = scores.relu().scatter(-1, which, 0.0)"}, ACTIVE),
    ("the k largest of each feature over the states",
     {KEEP: "values, which = scores.relu().topk(k, dim=0)",
      FEATURES: "features = torch.zeros_like(scores).scatter(0, which, values)"}, ACTIVE),
    ("the k N largest of the whole batch",
     {KEEP: "values, which = scores.relu().flatten().topk(k * len(x))",
      FEATURES: "features = torch.zeros_like(scores).flatten().scatter(0, which, values)\n    "
      "features = features.view_as(scores)"}, ACTIVE),
    ("an active feature is 1", {FEATURES: FEATURES.replace("values)", "(values > 0).to(x))")},
     ACTIVE),
    ("the values are a softmax of the k scores",
     {KEEP: "values, which = scores.topk(k, dim=-1)\n    values = values.softmax(-1)"}, ACTIVE),
    ("the centre is forgotten before the encoder", {'(x - p["centre"]) @': "x @"}, ACTIVE),
    ("the mean of the batch is the centre", {'(x - p["centre"]) @': "(x - x.mean(0)) @"}, ACTIVE),
    ("the threshold is subtracted", {'+ p["threshold"]': '- p["threshold"]'}, ACTIVE),
    ("the threshold is forgotten",
     {'+ p["threshold"]': '+ 0 * p["threshold"]'}, ACTIVE),
    ("the directions are the encoder as well",
     {'@ p["encoder"]': '@ p["directions"].mT + 0 * p["encoder"].sum()'}, ACTIVE),
    ("the centre is not added again", {'+ p["centre"] - x': "- x"}, LOSS),
    ("the error, not divided by the spread of the states",
     {LOSS_IS: "error.square().sum()"}, LOSS),
    ("the mean of the squares, not divided by the variance",
     {LOSS_IS: "error.square().mean()"}, LOSS),
    ("divided by the squares of the states, whose mean is not subtracted", {SPREAD: "x"}, LOSS),
    ("one mean for all features is subtracted", {SPREAD: "x - x.mean()"}, LOSS),
    ("each state's own mean is subtracted", {SPREAD: "x - x.mean(dim=-1, keepdim=True)"}, LOSS),
    ("the spread is taken around the centre of the dictionary",
     {SPREAD: 'x - p["centre"].detach()'}, LOSS),
    ("the variance divides by N - 1",
     {LOSS_IS: "error.square().mean() / x.var(dim=0).mean()"}, LOSS),
    ("the mean of the shares of each feature",
     {LOSS_IS: "(error.square().sum(0) / spread.square().sum(0)).mean()"}, LOSS),
    ("a penalty on the features is added",
     {LOSS_IS: LOSS_IS + " + 0.01 * features.sum(-1).mean()"}, LOSS),
    ("the error of the features that are active alone, divided by k",
     {LOSS_IS: LOSS_IS + " / k"}, LOSS),
    ("no gradient goes through the features",
     {ERROR: 'features.detach() @ p["directions"] + p["centre"] - x\n    '
      "error = error + 0 * features.sum()"}, ENCODER),
    ("gradients reach features that are not active",
     {ERROR: '(features + scores.relu() - scores.relu().detach()) @ p["directions"] '
      '+ p["centre"] - x'}, ENCODER),
    ("no gradient reaches the centre before the encoder",
     {'(x - p["centre"]) @': '(x - p["centre"].detach()) @'}, ENCODER),
    ("the threshold is not learned", {NEW: NEW + ' * (name != "threshold")'}, ENCODER),
    ("the centre is not learned", {NEW: NEW + ' * (name != "centre")'}, ENCODER),
    ("uphill: the gradient is added", {NEW: "part.detach() + lr * part.grad"}, ENCODER),
    ("the gradient is divided by its length, as if it were clipped",
     {NEW: "part.detach() - lr * part.grad / part.grad.norm()"}, ENCODER),
    ("the directions are not divided by their length", {DIVIDE: "pass"}, DIRECTIONS),
    ("columns have length 1, not rows", {"norm(dim=-1, keepdim=True)": "norm(dim=0, keepdim=True)"},
     DIRECTIONS),
    ("the directions are divided by the length of all together",
     {LENGTH: 'new["directions"].norm()'}, DIRECTIONS),
    ("the square root of the length is missing",
     {LENGTH: 'new["directions"].square().sum(dim=-1, keepdim=True)'}, DIRECTIONS),
    ("rows become sums of 1",
     {LENGTH: 'new["directions"].abs().sum(dim=-1, keepdim=True)'}, DIRECTIONS),
    ("only directions that are too long are shortened",
     {LENGTH: LENGTH + ".clamp(min=1)"}, DIRECTIONS),
    ("divided by their length before the step, not after it",
     {LENGTH: 'parts["directions"].norm(dim=-1, keepdim=True)'}, DIRECTIONS),
    ("the directions do not learn", {LENGTH: LENGTH + "\n    "
     'new["directions"] = parts["directions"] * length'}, DIRECTIONS),
    ("the encoder is made of the new directions, as at the start",
     {RETURN: 'new["encoder"] = new["directions"].mT\n    return new |'}, ENCODER),
    ("the encoder is divided by its length as well",
     {RETURN: 'new["encoder"] = new["encoder"] / new["encoder"].norm(dim=0, keepdim=True)\n    '
      "return new |"}, ENCODER),
    ("written into the parts of the caller",
     {RETURN: "for name in parts:\n        parts[name].copy_(new[name])\n    return new |"}, TWO),
    ("all is computed in float32",
     {GIVEN: "dtype, x = x.dtype, x.float()\n    p = {name: part.float().clone().requires_grad_() "
      "for name, part in parts.items()}",
      RETURN: "new = {name: part.to(dtype) for name, part in new.items()}\n    "
      "features, loss = features.to(dtype), loss.to(dtype)\n    return new |"}, DOUBLE),
]  # fmt: skip

CASES = (
    Case(ACTIVE, given, "subtract the centre, add the threshold, cut below 0, keep k of each state",
         use=active, points=3, teaching="which features, before any loss"),
    Case(FEW, lambda g: given(g, k=5, low=1.0),
         "a feature that is active is above 0, even where fewer than k are", use=active, points=2,
         teaching="where k is more than there is"),
    Case(ALL, lambda g: given(g, k=9), "k may be F: then every feature above 0 is active",
         use=active, teaching="nothing is left out"),
    Case(LOSS, given, "the squared error of all states, as a share of their squared distance to "
         "the mean", use=lost, points=2, teaching="a number before its gradient"),
    Case(FAR, lambda g: given(g, far=20.0, N=7),
         "a large mean is no spread: subtract it, feature by feature", use=lost,
         teaching="states of real models are far from 0"),
    Case(ENCODER, given, "the gradient goes through the values of active features, and through "
         "both places of the centre", use=encoder, points=3,
         teaching="three of the four parts, before their length matters"),
    Case(DIRECTIONS, given, "after the step each row of the directions is divided by its length",
         use=lengths, points=2, teaching="the part whose length matters"),
    Case(TWO, given, "the parts of a step are what the next one begins with", use=two_steps),
    Case(DOUBLE, lambda g: given(g, dtype=torch.float64), "nothing becomes float32"),
)  # fmt: skip

EXERCISE = Exercise(
    name="sae_step", function="dictionary_step", page="11_look_inside/5_dictionary",
    minutes=25, difficulty=2,
    outcome="Train a sparse autoencoder: few active features, an error that has a scale, "
            "directions of length 1.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write the shapes below each formula first. Which axis of the scores is that of the "
        "features, over which the k largest are taken?",
        "`topk` gives values and places, and `scatter` puts values back to their places in zeros. "
        "Both let gradients through to the values.",
        "Make copies of the parts that require gradients, call `backward`, and compute new tensors "
        "from `detach()` and `grad`. The length comes last: "
        "`norm(dim=-1, keepdim=True)` of the new directions.",
    ),
)  # fmt: skip
