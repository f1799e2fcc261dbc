r"""The loss of multi-token prediction: how surprised each depth is by the token that it predicts.

.. math::

   \mathcal{L} = \mathcal{L}_0 + \frac{\lambda}{D} \sum_{d=1}^{D} \mathcal{L}_d, \qquad
   \mathcal{L}_d = -\frac{1}{N_d} \sum_i \log p(x_{i+d+1} \mid x_{\le i+d})

:math:`\mathcal{L}_0` is the model's usual loss, and :math:`N_d` counts the columns whose document
goes on for d + 1 tokens.

Source: DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, arXiv:2412.19437, where λ is 0.3 at first
and 0.1 at the end.
"""

from torch import Tensor

from lm_from_scratch.models.mtp import MTP
from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM
from lm_from_scratch.text.targets import mtp_targets
from lm_from_scratch.training.loss import chunked_causal_lm_loss


def mtp_losses(
    model: Qwen2ForCausalLM,
    mtp: MTP,
    h: Tensor,
    idx: Tensor,
    *,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
) -> list[Tensor]:
    """The loss of every depth, in nats a token, from the model's states ``h`` (B, T, C), for
    ``idx`` at ``positions`` and in ``documents`` (B, T).

    With ``h`` detached, and the model's weights frozen, only the modules learn. Raises
    ``ValueError`` for states and tokens that do not fit.
    """
    states = mtp(model, h, idx, positions=positions, documents=documents)
    return [
        chunked_causal_lm_loss(
            state, model.head.weight, mtp_targets(idx, depth, positions=positions)
        )
        for depth, state in enumerate(states, 1)
    ]
