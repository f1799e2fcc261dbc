"""Distillation: which divergence, at which temperature, and what is impossible."""

from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training import distillation


def reference(
    student: Tensor, teacher: Tensor, targets: Tensor, temperature: float = 1.0
) -> Tensor:
    """The package's loss of the teacher alone."""
    return distillation.distillation_loss(student, teacher, targets, temperature)


def logits(g: Generator, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Of a student and of a teacher."""
    return normal(g, *shape, scale=2, dtype=dtype), normal(g, *shape, scale=2, dtype=dtype)


def one_place(g: Generator) -> Call:
    return call(*logits(g, 1, 6), integers(g, 0, 6, 1))


def hot(g: Generator) -> Call:
    return call(*logits(g, 2, 3, 7), integers(g, 0, 7, 2, 3), 2.0)


def some_ignored(g: Generator) -> Call:
    """Rows of 2, 5 and 1 targets; token 0 is among them."""
    targets = integers(g, 0, 9, 3, 6)
    targets[:, 0] = 0
    for row, length in enumerate((2, 5, 1)):
        targets[row, length:] = IGNORE
    return call(*logits(g, 3, 6, 9), targets, 1.5)


def none_counts(g: Generator) -> Call:
    """With anything in the logits."""
    student, teacher = logits(g, 2, 3, 5)
    student[0, 1], teacher[1] = torch.nan, torch.nan
    return call(student, teacher, torch.full((2, 3), IGNORE))


def rubbish(g: Generator) -> Call:
    made = some_ignored(g)
    student, teacher = made.args[:2]
    student[0, 2:], teacher[0, 2:] = torch.nan, -torch.inf
    student[2, 1:], teacher[2, 1:] = -torch.inf, torch.nan
    return made


def excluded(g: Generator) -> Call:
    """Tokens that the teacher excludes; some of them the student excludes as well."""
    student, teacher = logits(g, 3, 8)
    teacher[:, :3] = -torch.inf
    student[:, 0] = -torch.inf
    student[1, 1] = -torch.inf
    teacher[2, 1:7] = -torch.inf
    return call(student, teacher, integers(g, 0, 8, 3), 2.0)


def high(g: Generator) -> Call:
    """Logits at levels of their own, in the thousands, and tokens of probability exp(-300); one
    that the student finds nearly impossible, one that the teacher excludes."""
    student, teacher = logits(g, 3, 6)
    teacher[:, 2] -= 300
    student[:, 3] -= 300
    student[0, 4] -= 3000
    student[1, 1] -= 3000
    levels = torch.tensor([[0.0], [9999.0], [-2000.0]])
    teacher[1, 1] = -torch.inf
    return call(student + levels, teacher - levels, integers(g, 0, 6, 3))


def in_both(function: Any, student: Tensor, teacher: Tensor, *rest: Any) -> dict[str, Any]:
    """The loss of bfloat16, and that of float64, of numbers that float32 does not hold."""
    precise = student.double() / 3 - 2000, teacher.double() / 3
    return {
        "the loss of bfloat16": function(student, teacher, *rest),
        "the loss of two rows": function(student[:2], teacher[:2], rest[0][:2], *rest[1:]),
        "the loss of float64": function(*precise, *rest),
    }


def fixed(function: Any, student: Tensor, teacher: Tensor, targets: Tensor) -> dict[str, Any]:
    """Whether the teacher learns."""
    student, teacher = student.clone().requires_grad_(), teacher.clone().requires_grad_()
    loss = function(student, teacher, targets)
    loss.backward()
    return {"the loss": loss.detach(), "a gradient reaches the teacher": teacher.grad is not None}


# ------------------------------------------------------------------------------- wrong answers

PLACE, HOT, COLD = "one place", "temperature 2", "temperature 0.5"
SOME, NONE, RUBBISH = "ignored targets", "no target at all", "anything where the target is ignored"
EXCLUDED, HIGH = "excluded tokens", "high logits and small probabilities"
BOTH = "bfloat16 and float64"
GRADIENT, FIXED = "the gradient of the student", "the teacher stands still"
LOG_P = "log_p = (wanted / temperature).log_softmax(-1)"
LOG_Q = "log_q = (rows / temperature).log_softmax(-1)"
TERMS = "terms = torch.where(p > 0, p * (log_p - log_q), 0.0)"
WORK = "work = torch.promote_types(student.dtype, torch.float32)"
RETURN = "return temperature**2 * terms.sum() / counts.sum().clamp(min=1)"
NAN = "its result is NaN, which the report says in words"


def mixed(student: Tensor, teacher: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    return distillation.distillation_loss(student, teacher, targets, temperature, 0.5)


def labels(student: Tensor, teacher: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """The teacher's best token as a label."""
    return distillation.distillation_loss(
        student, teacher, teacher.argmax(-1).where(targets != IGNORE, IGNORE), temperature, 0.0
    )


def times_mask(
    student: Tensor, teacher: Tensor, targets: Tensor, temperature: float = 1.0
) -> Tensor:
    losses = distillation.forward_kl(student, teacher, temperature)
    counts = targets != IGNORE
    return (losses * counts).sum() / counts.sum().clamp(min=1)


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the divergence the other way round: KL(student, teacher)",
     {"p = log_p.exp()": "p = log_q.exp()", "(log_p - log_q)": "(log_q - log_p)"}, PLACE),
    ("the cross-entropy: the teacher's own entropy is not taken off",
     {"p * (log_p - log_q)": "p * -log_q"}, PLACE),
    ("only the teacher's best token is learned", labels, PLACE),
    ("half of the loss is that of the labels", mixed, PLACE),
    ("the squares of the differences of logits", {TERMS: "terms = (wanted - rows).square()"},
     PLACE),
    ("the sum over the places", {" / counts.sum().clamp(min=1)": ""}, SOME),
    ("the temperature is left out", {LOG_P: "log_p = wanted.log_softmax(-1)",
     LOG_Q: "log_q = rows.log_softmax(-1)", "temperature**2 * ": ""}, HOT),
    ("the temperature flattens, and its square is left out", {"temperature**2 * ": ""}, HOT),
    ("multiplied by the temperature, not by its square", {"temperature**2": "temperature"}, HOT),
    ("only the teacher is flattened", {LOG_Q: "log_q = rows.log_softmax(-1)"}, HOT),
    ("only the student is flattened", {LOG_P: "log_p = wanted.log_softmax(-1)"}, HOT),
    ("logits are multiplied by the temperature",
     {LOG_P: LOG_P.replace("/", "*"), LOG_Q: LOG_Q.replace("/", "*")}, HOT),
    ("probabilities are divided by the temperature, where logits should be",
     {LOG_P: "log_p = (wanted.softmax(-1) / temperature).log()",
      LOG_Q: "log_q = (rows.softmax(-1) / temperature).log()"}, HOT),
    ("ignored places are in the number to divide by",
     {"counts.sum().clamp(min=1)": "counts.numel()"}, SOME),
    ("ignored places count", {"counts = targets != IGNORE": "counts = targets == targets"}, SOME),
    ("token 0 is ignored too", {"counts = targets != IGNORE": "counts = targets > 0"}, SOME),
    ("the mean of the means of the rows",
     {RETURN: "each = counts.reshape(len(counts) if counts.dim() > 1 else 1, -1).sum(1).tolist()\n"
      "    parts = [x.sum() / max(len(x), 1) for x in terms.split(each)]\n"
      "    return temperature**2 * torch.stack(parts).mean()"}, SOME),
    ("no target at all gives NaN", {".clamp(min=1)": ""}, NONE, NAN),
    ("no target at all gives a number without a gradient",
     {WORK: f"if not counts.any():\n        return torch.tensor(0.0)\n    {WORK}"}, NONE),
    ("masked at the end, by a product with 0", times_mask, RUBBISH, NAN),
    ("what is impossible for both is 0 times infinity", {TERMS: "terms = p * (log_p - log_q)"},
     EXCLUDED, NAN),
    ("something small is added to the probabilities before the logarithm",
     {LOG_P: "log_p = ((wanted / temperature).softmax(-1) + 1e-9).log()",
      LOG_Q: "log_q = ((rows / temperature).softmax(-1) + 1e-9).log()"}, HIGH),
    ("-inf is replaced by -10,000, which other logits come near",
     {LOG_Q: "rows, wanted = (torch.where(x == -torch.inf, -1e4, x) for x in (rows, wanted))\n"
      f"    {LOG_Q}"}, HIGH),
    ("logarithms below -1000 are cut off", {LOG_Q: f"{LOG_Q}.clamp(min=-1000)"}, HIGH),
    ("divided by the temperature before the conversion to float32",
     {"student[counts].to(work), teacher[counts].detach().to(work)":
      "(student[counts] / temperature).to(work), (teacher[counts].detach() / temperature).to(work)",
      LOG_Q: "log_q = rows.log_softmax(-1)", LOG_P: "log_p = wanted.log_softmax(-1)"}, BOTH),
    ("exponentials without the largest logit subtracted",
     {LOG_Q: "log_q = rows / temperature\n    log_q = log_q - log_q.exp().sum(-1, keepdim=True)"
      ".log()"}, HIGH, NAN),
    ("computed in bfloat16", {WORK: "work = student.dtype",
     RETURN: RETURN.replace("terms.sum()", "terms.sum().to(torch.promote_types(work, "
     "torch.float32))")}, BOTH),
    ("float64 is computed in float32", {WORK: "work = torch.float32",
     RETURN: f"{RETURN}.to(torch.promote_types(student.dtype, torch.float32))"}, BOTH),
    ("a view of tensors that are not contiguous",
     {WORK: f"student.view(-1, 1), teacher.view(-1, 1), targets.view(-1)\n    {WORK}"}, HOT),
    ("the teacher learns as well", {".detach()": ""}, FIXED),
    ("the student is detached in the logarithm", {"(log_p - log_q)": "(log_p - log_q.detach())"},
     GRADIENT),
]  # fmt: skip

CASES = (
    Case(PLACE, one_place,
         "the teacher's probabilities weigh the differences of logarithms; sum over the tokens",
         points=3, teaching="the formula at temperature 1, which is the default"),
    Case(HOT, hot,
         "both logits are divided by the temperature; the whole is multiplied by its square",
         points=3, teaching="what the temperature changes"),
    Case(COLD, lambda g: call(*logits(g, 4, 7), integers(g, 0, 7, 4), 0.5), "the same below 1",
         teaching="the other side of 1"),
    Case(SOME, some_ignored, "8 of the 18 places count: divide the sum by 8", points=2,
         teaching="answers of other lengths"),
    Case(NONE, none_counts, "0 by at least 1; the gradient is 0, and exists", gradient=True),
    Case(RUBBISH, rubbish, "choose the places that count before you compute: NaN times 0 is NaN",
         gradient=True, teaching="NaN beside targets that count"),
    Case(EXCLUDED, excluded,
         "the logarithm of 0 is -inf, and -inf - -inf is NaN: replace these terms by 0", points=2,
         gradient=True, teaching="tokens that are impossible for both"),
    Case(HIGH, high, "log_softmax is exact where softmax is rounded to 0", points=2,
         tolerance=(1e-3, 1e-3)),
    Case(BOTH,
         lambda g: call(*logits(g, 4, 5, 30, dtype=torch.bfloat16), integers(g, 0, 30, 4, 5), 3.0),
         "float32 at least: convert both logits first", use=in_both),
    Case(GRADIENT, hot, "the gradient of a row is the temperature times q - p", gradient=True,
         teaching="the gradient alone, with nothing excluded"),
    Case(FIXED, one_place, "detach the teacher", use=fixed),
)  # fmt: skip

EXERCISE = Exercise(
    name="distillation_loss", function="distillation_loss",
    page="10_after_pretraining/4_distillation", minutes=25, difficulty=2,
    outcome="Write the loss of a student that imitates a whole distribution, impossible tokens "
            "included.",
    reference=reference, after=("cross_entropy",), cases=CASES, wrong=planted(WRONG),
    hints=(
        "Choose the places first: `student[targets != -100]` has shape (N, V), and nothing else is "
        "needed of the targets.",
        "Take `log_softmax` of both logits at the temperature. The probabilities of the teacher "
        "are `exp` of its logarithms.",
        "Where p is 0, the product is 0 times something infinite. `torch.where(p > 0, ..., 0.0)` "
        "replaces it, and lets no gradient through.",
    ),
)  # fmt: skip
