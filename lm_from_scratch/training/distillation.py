r"""Distillation: learn from a larger model what it finds probable, not from one right token.

A label says which token came next. A teacher says how probable it finds each of V: that ``4`` is
nearly as good as ``5`` here, and ``x`` is not. The student imitates the whole distribution. A
temperature :math:`\tau` above 1 flattens both, so that small probabilities count as well:

.. math::

   \mathcal{L} = \tau^2 \, \mathrm{KL}\bigl(p_\tau \,\|\, q_\tau\bigr), \qquad
   p_\tau = \mathrm{softmax}(\text{teacher} / \tau), \quad
   q_\tau = \mathrm{softmax}(\text{student} / \tau)

Gradients of flat distributions are small, by about :math:`1 / \tau^2`; the factor keeps them as
large as those of labels.

The *forward* divergence, KL(teacher, student), punishes a student that excludes what the teacher
finds possible: it spreads over all of it. The *reverse* one, KL(student, teacher), punishes what
the teacher would not say: the student may keep to a part. Both are 0 for equal distributions only.

Sources: Hinton, Vinyals, Dean, *Distilling the Knowledge in a Neural Network*, 2015,
arXiv:1503.02531; Gu et al., *MiniLLM*, 2023, arXiv:2306.08543 (reverse); Agarwal et al.,
*On-Policy Distillation of Language Models*, 2023, arXiv:2306.13649.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lm_from_scratch.limits import Limit, Positive, is_plain, require
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.loss import causal_lm_loss

_SHARE = Limit("must be in [0, 1]", lambda x: is_plain(x) and 0 <= x <= 1)


def forward_kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    r""":math:`\tau^2` KL(teacher, student) for each row of ``student`` and ``teacher`` logits
    (..., V): (...), in nats.

    A token that both exclude with -inf costs nothing. One that the student alone excludes costs
    infinitely much, if the teacher finds it possible; the gradient is finite even so. No gradient
    reaches the teacher. Computed in float32 at least. Raises ``ValueError`` for shapes that differ,
    and a ``temperature`` that is not positive.
    """
    log_q, log_p = distributions(student, teacher, temperature)
    return temperature**2 * kl_divergence(log_p, log_q)


def reverse_kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    r""":math:`\tau^2` KL(student, teacher) for each row of ``student`` and ``teacher`` logits
    (..., V), with all else as in :func:`forward_kl`. Here what the teacher alone excludes costs
    infinitely much, and the gradient is NaN: exclude it from the student, too."""
    log_q, log_p = distributions(student, teacher, temperature)
    return temperature**2 * kl_divergence(log_q, log_p)


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    share: float = 1.0,
    divergence: Callable[[Tensor, Tensor, float], Tensor] = forward_kl,
) -> Tensor:
    r"""The mean ``divergence`` of ``student`` and ``teacher`` logits (B, T, V) over the ``targets``
    (B, T) that are not -100, mixed with the usual loss of these targets; a scalar.

    The teacher has the weight ``share``, the labels :math:`1 - \text{share}`, at temperature 1. The
    result is 0, with a gradient of 0, if no target counts. Raises ``ValueError`` for other shapes,
    and a ``share`` outside [0, 1].
    """
    _SHARE.check("share", {"share": share})
    _check(student, teacher, temperature)
    labels = causal_lm_loss(student, targets)
    if share == 0:  # the divergence may be infinite
        return labels
    counts = targets != IGNORE
    imitation = divergence(student[counts], teacher[counts], temperature)
    imitation = imitation.sum() / max(len(imitation), 1)
    if share == 1:  # so may the labels' loss
        return imitation
    return share * imitation + (1 - share) * labels


def _check(student: Tensor, teacher: Tensor, temperature: float) -> None:
    require(Positive, temperature=temperature)
    if student.shape != teacher.shape:
        raise ValueError(
            f"the student's logits have shape {tuple(student.shape)}, the teacher's "
            f"{tuple(teacher.shape)}; both need the same tokens and vocabulary"
        )


def distributions(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The log-probabilities (..., V) of ``student`` and ``teacher`` logits (..., V) at a
    temperature; the teacher's without a gradient. Raises ``ValueError`` for shapes that differ, and
    a ``temperature`` that is not positive."""
    _check(student, teacher, temperature)
    work = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    log_q = (student.to(work) / temperature).log_softmax(dim=-1)
    return log_q, (teacher.detach().to(work) / temperature).log_softmax(dim=-1)


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    r"""KL(p, q) :math:`= \sum_v p_v \log (p_v / q_v)` of ``log_p`` and ``log_q`` (..., V); where p
    is 0, so is the term, even if q is 0 as well."""
    p = log_p.exp()
    return (p * (log_p - log_q).masked_fill(p == 0, 0.0)).sum(dim=-1)
