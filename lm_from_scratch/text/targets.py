"""What a model has to predict: the token that comes next, where one does."""

import torch
from torch import Tensor

IGNORE = -100  # a target that does not count


def next_token_targets(idx: Tensor, *, positions: Tensor | None = None) -> Tensor:
    """The token that follows each token of ``idx`` (B, T), or -100 where none does.

    None follows the last column, a padding token, or the last token of a packed document. All three
    are seen in the ``positions`` (B, T): the next one must be exactly one higher.
    """
    targets = torch.full_like(idx, IGNORE)
    targets[:, :-1] = idx[:, 1:]
    if positions is not None:
        follows = (positions[:, 1:] == positions[:, :-1] + 1) & (positions[:, :-1] >= 0)
        targets[:, :-1] = targets[:, :-1].masked_fill(~follows, IGNORE)
    return targets
