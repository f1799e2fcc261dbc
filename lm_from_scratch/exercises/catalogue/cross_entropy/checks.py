"""Cross-entropy of next tokens: which targets count, and what keeps the exponentials small."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal, refusal
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.loss import causal_lm_loss


def all_count(g: Generator) -> Call:
    return call(normal(g, 3, 4, 11), integers(g, 0, 11, 3, 4))


def some_ignored(g: Generator) -> Call:
    """Rows of 2, 5 and 1 targets, tokens 0 and 106 among them; -100 would be an index too."""
    targets = integers(g, 0, 107, 3, 6)
    targets[:, 0], targets[0, 1] = 0, 106
    for row, length in enumerate((2, 5, 1)):
        targets[row, length:] = IGNORE
    return call(normal(g, 3, 6, 107), targets)


def none_counts(g: Generator) -> Call:
    """A token is banned: 0 times its logit is NaN."""
    logits = normal(g, 2, 3, 7)
    logits[0, 1, 2] = -torch.inf
    return call(logits, torch.full((2, 3), IGNORE))


def high_levels(g: Generator) -> Call:
    """Each token has a level of its own: 0, 500, 1000."""
    levels = 500.0 * torch.arange(3).view(1, 3, 1)
    return call(normal(g, 2, 3, 9) + levels, integers(g, 0, 9, 2, 3))


def unlikely(g: Generator) -> Call:
    """One row of tokens, of a vocabulary that 16 bits do not count; one of five targets has a logit
    far below the others."""
    logits, targets = normal(g, 5, 33_000), integers(g, 32_768, 33_000, 5)
    logits[2, targets[2]] = -200.0
    return call(logits, targets)


def banned(g: Generator) -> Call:
    """One target counts. Tokens 0 and 5 are banned, at ignored places all but token 3. The other
    logits are near -2000, which a finite number for a ban must stay below."""
    logits, targets = normal(g, 2, 4, 6) - 2000, torch.full((2, 4), IGNORE)
    targets[1, 1] = 4
    logits[..., [0, 5]] = -torch.inf
    logits[0, 2:, [1, 2, 4]] = -torch.inf
    return call(logits, targets)


def precisions(g: Generator) -> Call:
    """Four axes: all but the last may be flattened into one."""
    logits = normal(g, 2, 2, 5, 33, scale=4, dtype=torch.bfloat16)
    return call(logits, integers(g, 0, 33, 2, 2, 5))


def in_both(function: Any, logits: Tensor, targets: Tensor) -> dict[str, Any]:
    """The loss of bfloat16, and that of float64, of numbers that float32 does not hold."""
    return {
        "the loss of bfloat16": function(logits, targets),
        "the loss of float64": function(logits.double() / 3, targets),
        "the loss of one text": function(logits[:1].double() / 3, targets[:1]),
    }


def other_shape(function: Any, logits: Tensor, targets: Tensor) -> dict[str, Any]:
    refused = refusal(ValueError)
    return {
        "the loss": function(logits, targets),
        "a call with the axes of targets exchanged": refused(function, logits, targets.T),
        "a call with flat targets": refused(function, logits, targets.flatten()),
        "a call with too few targets": refused(function, logits, targets[:, :1]),
        "a call with an axis of 1 after those of targets": refused(
            function, logits, targets[..., None]
        ),
    }


def agree(logits: Tensor, targets: Tensor) -> Tensor:
    """The logits in the dtype of the loss; ValueError if the shapes do not agree."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError("shapes")
    return logits if logits.dtype == torch.float64 else logits.float()


def written_out(function: Callable[..., Any], *args: Any) -> str:
    """Which of the library's losses is called, in the function or below it."""
    called = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            losses = [x for x in ("cross_entropy", "nll_loss") if x in getattr(f, "__name__", "")]
            if inspect.unwrap(function) is not causal_lm_loss:
                called.extend(losses)
            return f(*args, **(kwargs or {}))

    with Watch():
        function(*args)
    return f"calls F.{called[0]}" if called else "calls none of the library's losses"


# ------------------------------------------------------------------------------- wrong answers

DIVISOR = "counts.sum().clamp(min=1)"
SHAPES = "if logits.shape[:-1] != targets.shape"
RESULT = f"return losses.sum() / {DIVISOR}"
LOSSES = "losses = rows.logsumexp(1) - chosen"
FLOAT = "if rows.dtype != torch.float64:\n        rows = rows.float()"
CHOSEN = "chosen = rows.gather(1, wanted[:, None])[:, 0]"
ROWS = "rows, wanted = logits[counts], targets[counts]"
PICKED = "[torch.arange(len(rows)), wanted]"
NAN = "its result is NaN, which the report says in words"

IGNORED, PLAIN = "ignored targets", "every target counts"
HIGH = "high logits, at another level for each token"
UNLIKELY, NONE = "one axis of targets, one of probability exp(-200)", "no target at all"
BANNED, BOTH = "one target alone, and banned tokens", "bfloat16 and float64"
REFUSED, OWN = "targets of another shape", "written without the library's losses"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("ignored targets are in the number to divide by", {DIVISOR: "counts.numel()"}, IGNORED),
    ("the targets are shifted once more, though they are the next tokens already",
     {SHAPES: f"logits, targets = logits[..., :-1, :], targets[..., 1:]\n    {SHAPES}"}, PLAIN),
    ("-100 is taken as an index from the end of the vocabulary",
     {CHOSEN: f"chosen = rows{PICKED}",
      "counts = targets != IGNORE": "counts = targets == targets"}, IGNORED),
    ("token 0 is ignored too, as if it were padding",
     {"counts = targets != IGNORE": "counts = targets > 0"}, IGNORED),
    ("tokens from 100 on are ignored too",
     {"counts = targets != IGNORE": "counts = targets.abs() < 100"}, IGNORED),
    ("the mean of the means of the rows, where a short row weighs as much as a long one",
     {RESULT: "each = counts.reshape(len(counts) if counts.dim() > 1 else 1, -1).sum(1).tolist()\n"
      "    return torch.stack([x.sum() / max(len(x), 1) for x in losses.split(each)]).mean()"},
     IGNORED),
    ("the sum instead of the mean", {f" / {DIVISOR}": ""}, PLAIN),
    ("the sign is missing", {"losses.sum()": "-losses.sum()"}, PLAIN),
    ("the perplexity, which is exp of the loss",
     {"losses.sum() / counts.sum().clamp(min=1)": f"(losses.sum() / {DIVISOR}).exp()"}, PLAIN),
    ("the logits are taken as log-probabilities: the log of the sum is missing",
     {LOSSES: "losses = -chosen"}, PLAIN),
    ("cross-entropy of probabilities: softmax was applied twice",
     {CHOSEN: f"rows = rows.softmax(1)\n    {CHOSEN}"}, PLAIN),
    ("bits instead of nats", {"losses.sum()": "losses.sum() / 0.6931471805599453"}, PLAIN),
    ("nothing is subtracted before exp, which overflows",
     {"rows.logsumexp(1)": "rows.exp().sum(1).log()"}, HIGH),
    ("one maximum for all tokens, far above some of them",
     {CHOSEN: f"rows = rows - (rows.max() if len(rows) else 0.0)\n    {CHOSEN}",
      "rows.logsumexp(1)": "rows.exp().sum(1).log()"}, HIGH),
    ("the logarithm of a softmax that is rounded to 0",
     {LOSSES: f"losses = -rows.softmax(1){PICKED}.log()"}, UNLIKELY),
    ("something small is added to the probability before the logarithm",
     {LOSSES: f"losses = -(rows.softmax(1){PICKED} + 1e-9).log()"}, UNLIKELY),
    ("no target at all gives NaN", {DIVISOR: "counts.sum()"}, NONE, NAN),
    ("no target at all gives the sum of the logits times 0",
     {ROWS: f"if not counts.any():\n        return logits.sum() * 0\n    {ROWS}"}, NONE, NAN),
    ("no target at all gives a number without a gradient",
     {ROWS: f"if not counts.any():\n        return torch.tensor(0.0)\n    {ROWS}"}, NONE),
    ("an infinite loss times 0",
     {ROWS: "rows, wanted = logits.flatten(0, -2), targets.flatten().clamp(min=0)",
      "losses.sum()": "(losses * counts.flatten()).sum()"}, BANNED, NAN),
    ("a banned token gets a logit of -1000, which others are below",
     {ROWS: f"{ROWS}\n    rows = rows.masked_fill(rows == -torch.inf, -1000.0)"}, BANNED),
    ("computed in bfloat16",
     {FLOAT: "pass", "return losses.sum()": "return losses.float().sum()"}, BOTH),
    ("the loss of bfloat16 is rounded to bfloat16",
     {f"/ {DIVISOR}": f"/ {DIVISOR} * logits.new_ones(())",
      "return losses": "losses = losses.to(logits.dtype)\n    return losses"}, BOTH),
    ("float64 is computed in float32",
     {FLOAT: "rows = rows.float()", "losses.sum()": "losses.sum().to(logits.dtype)"}, BOTH),
    ("a view of tensors that are not contiguous",
     {ROWS: f"logits.view(-1, logits.shape[-1])\n    {ROWS}"},
     PLAIN),
    ("only for logits with two axes or more before the last",
     {ROWS: f"logits.flatten(1, -2)\n    {ROWS}"}, UNLIKELY),
    ("the ignored targets are overwritten in the caller's tensor",
     {RESULT: f"targets[~counts] = 0\n    {RESULT}"}, IGNORED),
    ("flattened without a look at the shapes",
     {SHAPES: f"logits, targets = logits.flatten(0, -2), targets.flatten()\n    {SHAPES}"},
     REFUSED),
    ("targets with one axis more, of size 1, are taken too",
     {SHAPES: "targets = targets.squeeze(-1) if targets.dim() == logits.dim() else targets\n"
      f"    {SHAPES}"}, REFUSED),
    ("the loss of torch, which the text asks to do without",
     {LOSSES: "losses = torch.nn.functional.cross_entropy(rows, wanted, reduction='none')"}, OWN),
    ("torch's loss of log-probabilities, by a name below F.nll_loss",
     {LOSSES: "losses = torch._C._nn.nll_loss(rows.log_softmax(-1), wanted, reduction=2)"}, OWN),
    ("the log of the sum is detached",
     {"rows.logsumexp(1)": "rows.detach().logsumexp(1)"}, "the gradient of the logits"),
]  # fmt: skip

CASES = (
    Case(PLAIN, all_count,
         "the log of the sum of exponentials, minus the target's own logit; then the mean",
         points=3, teaching="the plain formula, and the first thing to read"),
    Case(IGNORED, some_ignored,
         "8 of the 18 targets count: divide the sum of their losses by 8. Token 0 is a token like "
         "any other", points=2,
         teaching="the idea of the exercise, without anything else that is difficult"),
    Case(NONE, none_counts,
         "0 / 0 is NaN: divide by the number of targets, but at least by 1", gradient=True),
    Case(HIGH, high_levels,
         "exp(1000) is infinite, exp(-1000) is 0: subtract from each token its own largest logit, "
         "or use logsumexp"),
    Case(UNLIKELY, unlikely,
         "exp(-200) is 0 in float32, and its logarithm minus infinity: never take the logarithm "
         "of a probability that was rounded"),
    Case(BANNED, banned, "0 * inf is NaN: take the ignored tokens out, instead of multiplying by 0",
         tolerance=(1e-3, 1e-3)),
    Case(BOTH, precisions,
         "convert to float32 before anything else, unless the logits are float64", use=in_both),
    Case(REFUSED, all_count,
         "compare targets.shape with logits.shape[:-1] and raise a ValueError: once flat, both "
         "may have as many elements and not fit", use=other_shape),
    Case(OWN, some_ignored,
         "the exercise is to write the loss: neither F.cross_entropy nor F.nll_loss is called",
         use=written_out, guard=True),
    Case("the gradient of the logits", some_ignored,
         "the sum over all tokens depends on every logit: nothing may be detached", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="cross_entropy", function="cross_entropy", page="1_gpt2/4_training", minutes=20,
    difficulty=1,
    outcome="Write the loss of a language model so that padding does not count and large logits "
            "do not overflow.",
    reference=causal_lm_loss, cases=CASES, wrong=planted(WRONG),
    hints=(
        "One number for each token, then a mean. Which tokens are in the sum, and how many?",
        "A mask of bools as an index, `logits[counts]`, leaves the rows that count, (N, V): the "
        "rest needs no mask.",
        "The logarithm of a quotient is a difference: of the log of a sum of exponentials, for "
        "which torch has a function that does not overflow, and of one logit, which `gather` "
        "picks. Then a mean over how many? Think of a batch without targets.",
    ),
)  # fmt: skip
