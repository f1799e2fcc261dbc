r"""Direct preference optimisation: of two answers, make the better one more probable.

Each answer gets a reward without a reward model: by how much the model that learns, :math:`\pi`,
finds it more probable than the frozen model that it started from, the *reference*.

.. math::

   r(y) = \beta \, \log \frac{\pi(y \mid x)}{\pi_\mathrm{ref}(y \mid x)}, \qquad
   \mathcal{L} = -\log \sigma(m), \quad m = r(y_\mathrm{chosen}) - r(y_\mathrm{rejected})

:math:`\sigma(m)` is the probability that a judge with these rewards prefers the chosen answer
(Bradley, Terry), so the loss is the cross-entropy of the judgements. A larger :math:`\beta` keeps
the model nearer to the reference: a small change then already earns the margin.

At the first step the model is the reference. All rewards are 0, the judge tosses a coin, and the
loss is :math:`-\log \tfrac{1}{2} = \ln 2 = 0.693`, whatever the data. A loss that starts elsewhere
has another reference; one that stays there has no gradient.

Only the margin matters. It may grow while *both* answers become less probable, as long as the
rejected one does so faster.

Sources: Rafailov et al., *Direct Preference Optimization*, 2023, arXiv:2305.18290; Mitchell, *A
Note on DPO with Noisy Preferences*, 2023 (label smoothing).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.limits import Limit, Positive, is_plain, require

_SMOOTHING = Limit("must be in [0, 0.5)", lambda x: is_plain(x) and 0 <= x < 0.5)


class Preference(NamedTuple):
    """What B pairs cost, ``losses`` (B,), and the rewards (B,) of their answers, which have no
    gradient."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def margins(self) -> Tensor:
        """By how much each chosen answer has the higher reward: (B,)."""
        return self.chosen_rewards - self.rejected_rewards


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Preference:
    r"""The loss above for B pairs, from log-probabilities of whole answers, as
    :func:`~lm_from_scratch.training.log_probs.sequence_log_probs` finds them: by the model,
    ``chosen`` and ``rejected`` (B,), and by the reference, ``reference_chosen`` and
    ``reference_rejected`` (B,).

    With ``label_smoothing`` :math:`\epsilon`, so large a share of the judgements is taken to be
    wrong: :math:`-(1 - \epsilon) \log \sigma(m) - \epsilon \log \sigma(-m)`. The margin then has a
    best value, :math:`\log \frac{1 - \epsilon}{\epsilon}`, instead of growing for ever.

    No gradient reaches the reference. Raises ``ValueError`` for shapes that differ, a ``beta`` that
    is not positive, and a ``label_smoothing`` outside [0, 0.5).
    """
    require(Positive, beta=beta)
    _SMOOTHING.check("label_smoothing", {"label_smoothing": label_smoothing})
    shapes = {tuple(t.shape) for t in (chosen, rejected, reference_chosen, reference_rejected)}
    if len(shapes) > 1 or chosen.dim() != 1:
        raise ValueError(
            f"log-probabilities have the shapes {sorted(shapes)}; all four must be (B,), one "
            "number for each answer"
        )
    chosen_rewards = beta * (chosen - reference_chosen.detach())
    rejected_rewards = beta * (rejected - reference_rejected.detach())
    margins = chosen_rewards - rejected_rewards
    losses = -F.logsigmoid(margins)
    if label_smoothing:
        losses = torch.lerp(losses, -F.logsigmoid(-margins), label_smoothing)
    return Preference(losses, chosen_rewards.detach(), rejected_rewards.detach())
