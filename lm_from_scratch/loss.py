r"""The language-model loss: how surprised the model is by the token that came next.

.. math::

   \mathcal{L} = -\frac{1}{N} \sum_{t} \log p(x_{t+1} \mid x_{\le t})

in nats, over the N tokens that have a real successor. A model that knows nothing scores
:math:`\log V`; :math:`e^{\mathcal{L}}` is the perplexity.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a target that does not count


def next_token_targets(idx: Tensor, positions: Tensor | None = None) -> Tensor:
    """The token that follows each token of ``idx`` (B, T), or -100 where none does.

    None follows the last column, a padding token, or the last token of a packed document. All
    three are seen in the positions: the next one must be exactly one higher.
    """
    targets = torch.full_like(idx, IGNORE)
    targets[:, :-1] = idx[:, 1:]
    if positions is not None:
        follows = (positions[:, 1:] == positions[:, :-1] + 1) & (positions[:, :-1] >= 0)
        targets[:, :-1] = targets[:, :-1].masked_fill(~follows, IGNORE)
    return targets


def causal_lm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of ``logits`` (B, T, V) over the ``targets`` (B, T) that are not -100.

    The result is 0 (with a gradient of 0), not NaN, if no target counts. Low-precision logits are
    cast up to float32.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, targets {tuple(targets.shape)}; "
            "all but the last dimension of the logits must agree"
        )
    work = torch.promote_types(logits.dtype, torch.float32)
    total = F.cross_entropy(
        logits.flatten(0, -2).to(work), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total / (targets != IGNORE).sum().clamp(min=1)
