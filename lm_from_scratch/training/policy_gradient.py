r"""Learning from a reward: say something, be graded, make what was graded well more probable.

Nothing in an answer says how it should have been. But the gradient of the *expected* reward is an
expectation itself, so that samples estimate it (REINFORCE):

.. math::

   \nabla \, \mathbb{E}_{y \sim \pi}[R(y)] = \mathbb{E}_{y \sim \pi}[A(y) \, \nabla \log \pi(y)],
   \qquad A(y) = R(y) - b

for any baseline b that does not depend on y: it changes no mean, and may remove most of the noise.
GRPO asks for a group of answers to each prompt, and compares each with its group: no second model
has to predict the reward. A group whose answers are all right, or all wrong, teaches nothing.

To take several steps on the same answers, PPO weighs each token by how much more probable it has
become since it was drawn, :math:`\rho = \pi / \pi_\mathrm{old}`, and stops where that has gone far
enough:

.. math::

   \ell_t = -\min\bigl(\rho_t A, \; \mathrm{clip}(\rho_t, 1 - \epsilon_\mathrm{low},
   1 + \epsilon_\mathrm{high}) \, A\bigr)

In the first step :math:`\rho = 1`, and the gradient is that of REINFORCE. Shapes: B answers of at
most T tokens, P prompts with G answers each, B = P G.

Sources: Williams, *Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
Learning*, 1992; Schulman et al., *Proximal Policy Optimization Algorithms*, 2017, arXiv:1707.06347;
Shao et al., *DeepSeekMath*, 2024, arXiv:2402.03300 (GRPO); Ahmadian et al., *Back to Basics*, 2024,
arXiv:2402.14740 (leaving one out); Liu et al., *Understanding R1-Zero-Like Training*, 2025,
arXiv:2503.20783 (Dr. GRPO); Yu et al., *DAPO*, 2025, arXiv:2503.14476; Schulman, *Approximating KL
Divergence*, 2020.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lm_from_scratch.limits import Count, NotNegative, require

# ---------------------------------------------------------------------------------- advantages


def group_advantages(rewards: Tensor, scale: bool = True, eps: float = 1e-4) -> Tensor:
    """How much better than its group each answer is: ``rewards`` (P, G) less their means, (P, G).

    With ``scale``, as in GRPO, they are divided by the group's standard deviation (that of a
    sample, plus ``eps``): the unit of the reward is gone, and a group in which one answer differs
    pulls as hard as one that is split in halves. Without it, as in Dr. GRPO, the gradient is that
    of the expected reward. A group of equal rewards has 0 in both cases. Raises ``ValueError`` as
    :func:`leave_one_out` does.
    """
    check_groups(rewards)
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)  # whose mean may be rounded
    centred = (rewards - rewards.mean(dim=1, keepdim=True)).masked_fill(equal, 0.0)
    return centred / (rewards.std(dim=1, keepdim=True) + eps) if scale else centred


def leave_one_out(rewards: Tensor) -> Tensor:
    """The baseline (P, G) of each answer for ``rewards`` (P, G): the mean of the others.

    It does not depend on the answer itself, so the gradient has no bias. With the mean of the whole
    group the gradient is (G - 1) / G times as long. Raises ``ValueError`` for groups of one answer,
    other shapes, and rewards that are not finite floating-point numbers.
    """
    check_groups(rewards)
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


def check_groups(rewards: Tensor) -> None:
    """Raises ``ValueError`` for what cannot be compared within groups."""
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}; it must be (P, G), with G at least 2: an "
            "answer is compared with the others to its prompt"
        )
    if not rewards.is_floating_point() or not rewards.isfinite().all():
        raise ValueError(f"rewards {rewards.dtype} must be finite floating-point numbers")


# -------------------------------------------------------------------------------------- losses


def reinforce_loss(
    log_probs: Tensor, rewards: Tensor, mask: Tensor, baseline: Tensor | float = 0.0
) -> Tensor:
    """A scalar whose gradient is, on average, that of minus the expected reward.

    ``log_probs`` (B, T) are those of the tokens drawn, with ``mask`` (B, T) true where the model
    said one; ``rewards`` (B,) and the ``baseline``, (B,) or one number, have no gradient. The value
    itself means nothing. Raises ``ValueError`` for shapes that do not fit.
    """
    check_shapes(log_probs, rewards, mask=mask)
    advantages = (rewards - baseline).detach()
    if advantages.shape != rewards.shape:
        raise ValueError(
            f"the baseline makes advantages of shape {tuple(advantages.shape)}; it must be a "
            f"number, or {tuple(rewards.shape)} as the rewards"
        )
    return -(advantages * log_probs.masked_fill(~mask.bool(), 0.0).sum(dim=1)).mean()


class PolicyLoss(NamedTuple):
    """The ``loss``, with a gradient, and two numbers to watch, without: the share of tokens that
    are ``clipped`` and pull no more, and the mean ``kl`` per token from the reference, 0 without
    one. All are scalars."""

    loss: Tensor
    clipped: Tensor
    kl: Tensor


def mean_of_means(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over answers of the mean over tokens, as in GRPO, of ``x`` (B, T) where the ``mask``
    (B, T) is true. Every answer weighs as much, so a token of a long one weighs less: a long wrong
    answer is punished less, token by token, than a short one."""
    return (x.masked_fill(~mask, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over all tokens, as in DAPO, of ``x`` (B, T) where the ``mask`` (B, T) is true:
    within one batch every token weighs as much."""
    return x.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def constant_mean(length: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The sum over tokens by the number of answers and a constant, as in Dr. GRPO, where it is the
    most tokens that an answer may have: no length is preferred. Up to the constant it is the
    gradient of REINFORCE. Raises ``ValueError`` for a ``length`` below 1."""
    require(Count, length=length)
    return lambda x, mask: x.masked_fill(~mask, 0.0).sum() / (len(x) * length)


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: tuple[float, float] = (0.2, 0.2),
    reference_log_probs: Tensor | None = None,
    kl: float = 0.0,
    average: Callable[[Tensor, Tensor], Tensor] = mean_of_means,
) -> PolicyLoss:
    r"""The clipped loss above, of B answers with ``advantages`` (B,).

    The log-probabilities are ``log_probs`` (B, T) by the model as it is, ``old_log_probs`` (B, T)
    by the model that drew the answers, kept from then, and ``reference_log_probs`` (B, T), if any.
    (Old ones computed again in each step would always equal the new ones, and nothing would ever be
    clipped.) ``mask`` (B, T) is true where the model said a token: not in the prompt, not after the
    end. ``clip`` is the pair of :math:`\epsilon`; with ``math.inf`` for both, nothing is clipped.
    ``average`` makes a scalar of the tokens' losses.

    To stay near a reference, ``kl`` times an estimate of the divergence from it is added to each
    token (k3: never negative, and on average KL(model, reference)),

    .. math:: \frac{\pi_\mathrm{ref}}{\pi} - \log \frac{\pi_\mathrm{ref}}{\pi} - 1

    Its *gradient* is on average that of the other divergence, KL(reference, model). No gradient
    reaches advantages, reference or old log-probabilities. Raises ``ValueError`` for shapes that
    do not fit, negative numbers, and a ``kl`` without a reference.
    """
    check_shapes(log_probs, advantages, old_log_probs=old_log_probs, mask=mask)
    low, high = clip
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip={clip} must be two numbers, neither negative")
    require(NotNegative, kl=kl)
    mask, A = mask.bool(), advantages.detach()[:, None]
    ratio = difference(log_probs, old_log_probs, mask).exp()
    losses = -torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
    clipped = torch.where(A > 0, ratio > 1 + high, (ratio < 1 - low) & (A < 0))
    divergence = torch.zeros_like(losses)
    if reference_log_probs is not None:
        check_shapes(log_probs, advantages, reference_log_probs=reference_log_probs)
        gain = difference(log_probs, reference_log_probs, mask)
        divergence = torch.expm1(-gain) + gain
        losses = losses + kl * divergence
    elif kl:
        raise ValueError(f"kl={kl} needs reference_log_probs to stay near to")
    return PolicyLoss(
        average(losses, mask),
        token_mean(clipped.to(losses.dtype), mask),
        token_mean(divergence.detach(), mask),
    )


def difference(log_probs: Tensor, fixed: Tensor, mask: Tensor) -> Tensor:
    """``log_probs`` (B, T) less ``fixed`` ones (B, T) without a gradient, and 0 where the ``mask``
    (B, T) is false, whatever stands there."""
    return (log_probs - fixed.detach()).masked_fill(~mask, 0.0)


def check_shapes(log_probs: Tensor, each: Tensor, **others: Tensor) -> None:
    """Raises ``ValueError`` unless ``log_probs`` and the others are (B, T), and ``each`` (B,)."""
    if log_probs.dim() != 2 or each.shape != log_probs.shape[:1]:
        raise ValueError(
            f"log_probs have shape {tuple(log_probs.shape)}, rewards or advantages "
            f"{tuple(each.shape)}; they must be (B, T) and (B,)"
        )
    for name, other in others.items():
        if other.shape != log_probs.shape:
            raise ValueError(
                f"{name} has shape {tuple(other.shape)}; it must be {tuple(log_probs.shape)}, as "
                "log_probs"
            )
