"""Bug hunt: a step of GRPO whose loss is right and whose gradient is 0."""

from typing import Any

import torch
from torch import Generator, Tensor, nn

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.log_probs import token_log_probs
from lm_from_scratch.training.policy_gradient import grpo_loss, token_mean


class Tiny(nn.Module):
    """Logits (B, T, V) of ids (B, T), from each token and the one before it."""

    def __init__(self, g: Generator, V: int = 7, C: int = 5, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.words = nn.Parameter(normal(g, V, C, dtype=dtype))
        self.before = nn.Parameter(normal(g, V, C, dtype=dtype))
        self.head = nn.Parameter(normal(g, V, C, dtype=dtype))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words[ids] + nn.functional.pad(self.before[ids[:, :-1]], (0, 0, 1, 0))
        logits: Tensor = x.tanh() @ self.head.mT
        return logits


def log_probs(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """As the package finds them."""
    targets = ids[:, 1:] if mask is None else ids[:, 1:].masked_fill(~mask, IGNORE)
    return token_log_probs(model(ids)[:, :-1], targets)


def reference(
    model: nn.Module,
    ids: Tensor,
    noted: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
) -> Tensor:
    """The package's loss of these answers."""
    now = log_probs(model, ids, mask)
    return grpo_loss(
        now, noted.masked_fill(~mask, 0.0), advantages, mask, (clip, clip), average=token_mean
    ).loss


# ------------------------------------------------------------------------------------- arguments


def answers(g: Generator, steps: int = 0, dtype: torch.dtype = torch.float32) -> Call:
    """Answers of a group of four, and a model that has moved a little since it wrote them."""
    model = Tiny(g, dtype=dtype)
    ids = integers(g, 0, 7, 4, 9)
    first, length = integers(g, 0, 3, 4, 1), 3 + torch.randperm(4, generator=g)[:, None]
    places = torch.arange(8)
    mask = (places >= first) & (places < first + length)
    with torch.no_grad():
        noted = log_probs(model, ids)
        for weight in model.parameters() if steps else ():
            weight.add_(0.4 * normal(g, *weight.shape, dtype=dtype))
    advantages = torch.tensor([1.5, 0.25, -1.0, -0.75], dtype=dtype)
    return call(model, ids, noted, advantages[torch.randperm(4, generator=g)], mask)


def first_step(g: Generator) -> Call:
    return answers(g)


def later_step(g: Generator) -> Call:
    return answers(g, steps=1)


def wide(g: Generator) -> Call:
    made = answers(g, steps=1)
    model, ids, noted, advantages, mask = made.args
    return call(model, ids, noted, advantages + 0.5, mask, clip=1.0)  # their mean need not be 0


def rubbish(g: Generator) -> Call:
    made = answers(g, steps=1)
    noted, mask = made.args[2], made.args[4]
    mask[:, -1], mask[0, 1] = False, False
    noted[~mask] = torch.nan
    noted[:, -1] = torch.tensor([-torch.inf, torch.inf, -1e30, torch.nan])
    return made


def hanging(g: Generator) -> Call:
    """Nobody stopped the graph when the answers were written."""
    model, ids, _, advantages, mask = answers(g).args
    return call(model, ids, log_probs(model, ids), advantages, mask)


def value(function: Any, *args: Any, **options: Any) -> dict[str, Tensor]:
    """The loss, as it is printed."""
    return {"the loss": function(*args, **options).detach()}


def gradients(function: Any, model: nn.Module, *args: Any, **options: Any) -> dict[str, Any]:
    """What the weights get, and who else; the weights have none before."""
    loss = function(model, *args, **options)
    early = [name for name, p in model.named_parameters() if p.grad is not None]
    loss.backward()
    results: dict[str, Any] = {"the weights that had a gradient before backward()": early}
    for name, p in model.named_parameters():
        results[f"the gradient of {name}"] = torch.zeros(()) if p.grad is None else p.grad
    return results


def others(
    function: Any, model: nn.Module, ids: Tensor, noted: Tensor, advantages: Tensor, mask: Tensor
) -> dict[str, Any]:
    """Whether a gradient reaches what is fixed, and what becomes of earlier gradients and of the
    mode of the model."""
    noted, advantages = noted.clone().requires_grad_(), advantages.clone().requires_grad_()
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # of another part of the batch
    model.train()
    function(model, ids, noted, advantages, mask)
    stays = model.training
    model.eval()
    loss = function(model, ids, noted, advantages, mask)
    kept = [p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    loss.backward()
    return {
        "gradients that were there are kept": all(kept),
        "a gradient reaches the noted log-probabilities": noted.grad is not None,
        "a gradient reaches the advantages": advantages.grad is not None,
        "weights without a gradient": [n for n, p in model.named_parameters() if p.grad is None],
        "a model in training is so afterwards": stays,
        "a model in evaluation is in training afterwards": model.training,
    }


def three_steps(function: Any, model: nn.Module, *args: Any) -> dict[str, Any]:
    """Three steps on the same answers: what the loss was in each, and where the weights are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = function(model, *args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    results = {"the losses of three steps": torch.stack(losses)}
    return results | {f"{name} after them": p.detach() for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------- wrong answers

VALUE, FIRST, LATER = "the loss of the first step", "the gradient of the first step", "a later step"
WIDE, THREE = "another clip", "three steps on the same answers"
CLIPPED = "the gradient of a later step"
RUBBISH, HANGING = "anything outside the answers", "noted with its graph"
OTHERS = "what gets no gradient"
NOW = "now = log_probs_of(model, ids)"
CHANGE = "now - noted.detach()"
MIN = "losses = -torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)"
RETURN = "return torch.where(mask, losses, 0.0).sum() / mask.sum()"
NAN = "its result is NaN, which the report says in words"


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found",
     {NOW: "return step_loss_as_found(model, ids, noted, advantages, mask, clip)"}, FIRST),
    ("the model is asked again, under no_grad",
     {RETURN: f"loss = {RETURN[7:]}\n    return loss.detach().requires_grad_()"}, FIRST),
    ("the model is asked again, and its answer detached",
     {NOW: "now = log_probs_of(model, ids).detach().requires_grad_()"}, FIRST,
     "the loss is right and no weight gets a gradient, as with no_grad"),
    ("the noted numbers become a leaf: the gradient ends there",
     {NOW: "now = noted.detach().clone().requires_grad_()"}, FIRST),
    ("both are computed now, neither is detached: the ratio is the constant 1",
     {CHANGE: "now - log_probs_of(model, ids)"}, FIRST),
    ("the old ones are the new ones, detached: right in the first step only",
     {CHANGE: "now - now.detach()"}, LATER),
    ("the noted numbers keep their graph, which cancels the other",
     {"noted.detach()": "noted"}, HANGING),
    ("the advantages get a gradient", {"advantages.detach()": "advantages"}, OTHERS),
    ("the ratio the other way round", {CHANGE: "noted.detach() - now"}, FIRST),
    ("the logarithm instead of the ratio", {"0.0).exp()": "0.0)"}, FIRST),
    ("the log-probabilities themselves, without the ratio", {CHANGE: "now"}, VALUE),
    ("the loss of REINFORCE: its gradient is right in the first step",
     {MIN: "losses = -torch.where(mask, now, 0.0) * A"}, VALUE),
    ("never clipped", {MIN: "losses = -ratio * A"}, CLIPPED),
    ("clipped always", {MIN: "losses = -ratio.clamp(1 - clip, 1 + clip) * A"}, CLIPPED),
    ("the larger of the two", {"torch.minimum": "torch.maximum"}, CLIPPED),
    ("the clip is always 0.2", {"ratio.clamp(1 - clip, 1 + clip)": "ratio.clamp(0.8, 1.2)"}, WIDE),
    ("the sign is lost: what was bad becomes more probable",
     {"losses = -torch": "losses = torch"}, VALUE),
    ("divided by all places, the prompts' too", {"/ mask.sum()": "/ mask.numel()"}, VALUE),
    ("prompts count as well", {RETURN: "return losses.sum() / mask.sum()"}, VALUE),
    ("the mean over answers of their means",
     {RETURN: "return (torch.where(mask, losses, 0.0).sum(1) / mask.sum(1).clamp(min=1)).mean()"},
     VALUE),
    ("masked at the end only, by a product with 0",
     {"torch.where(mask, now - noted.detach(), 0.0)": "(now - noted.detach())",
      "torch.where(mask, losses, 0.0)": "(losses * mask)"}, RUBBISH, NAN),
    ("the target of a token is the token itself",
     {NOW: "now = model(ids)[:, 1:].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]"}, VALUE),
    ("backward is called in the function, and once more outside",
     {RETURN: f"loss = {RETURN[7:]}\n    loss.backward(retain_graph=True)\n    return loss"},
     FIRST),
    ("the model is left in training mode", {NOW: f"model.train()\n    {NOW}"}, OTHERS),
    ("gradients that were there are deleted", {NOW: f"model.zero_grad()\n    {NOW}"}, OTHERS),
    ("NaN is replaced by 0, and infinite differences are not",
     {"torch.where(mask, now - noted.detach(), 0.0)": "(now - noted.detach()).nan_to_num()"},
     RUBBISH, NAN),
]  # fmt: skip

CASES = (
    Case(VALUE, first_step, "in the first step all ratios are 1, and the loss as found was right",
         use=value, guard=True, teaching="the code as found passes it: the loss shows nothing"),
    Case(FIRST, first_step, "the weights learn through a pass of the model: where is it?",
         use=gradients, points=3, teaching="the symptom: weights without a gradient"),
    Case(LATER, later_step,
         "the weights have moved since: what was noted is the old, and the ratio is not 1",
         use=value, points=2, teaching="where the second repair fails"),
    Case(CLIPPED, later_step,
         "tokens that have gone beyond the clip, in the direction of their advantage, have none",
         use=gradients, points=2, teaching="what the clip is for"),
    Case(WIDE, wide, "clip is an argument", use=gradients),
    Case(THREE, first_step, "the second step on the same answers already has other ratios",
         use=three_steps, points=3, teaching="what a run does: the weights move"),
    Case(RUBBISH, rubbish, "replace what is outside the answers; NaN times 0 is NaN",
         use=gradients),
    Case(HANGING, hanging, "two passes with equal graphs cancel: the old one must be a constant",
         use=gradients, points=2, teaching="a gradient that is there, and 0"),
    Case(OTHERS, later_step, "only the weights of the model learn; optimizers delete gradients",
         use=others, points=2),
    Case("float64", lambda g: answers(g, steps=1, dtype=torch.float64), "nothing becomes float32",
         use=value, teaching="more digits"),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_no_gradient", function="step_loss", page="10_after_pretraining/3_rewards",
    minutes=25, difficulty=2,
    outcome="Tell a loss that is 0 from a loss that has no gradient, and keep old probabilities "
            "apart from new ones.",
    reference=reference, after=("grpo_loss",), hunt="a thread on a trainer of reasoning models",
    cases=CASES, wrong=planted(WRONG),
    hints=(
        "Print the norm of the gradient of one weight after `backward()`, with the last line of "
        "the code as it is. Then remove that line and read the message again: is it wrong?",
        "Which of the numbers in the ratio depend on the weights as they are *now*? Look for the "
        "call of the model.",
        "The new log-probabilities must come from a pass of the model with its graph. The old ones "
        "were written down, and stay as they were while the weights move: `noted.detach()`, not "
        "`now.detach()`, which is the same number only in the first step.",
    ),
)  # fmt: skip
