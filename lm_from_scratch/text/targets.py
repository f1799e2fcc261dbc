"""What a model has to predict: the token that comes next, where one does, or one after it."""

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


def mtp_targets(idx: Tensor, depth: int, *, positions: Tensor | None = None) -> Tensor:
    """The token ``depth + 1`` places after each token of ``idx`` (B, T), or -100 where the row ends
    before it, or the document, as ``positions`` (B, T) say. Depth 0 is :func:`next_token_targets`.

    One step at a time: the target of depth d is the target of depth d - 1 of the token that
    follows, if one follows. Raises ``ValueError`` for a negative ``depth``.
    """
    if type(depth) is not int or depth < 0:
        raise ValueError(f"depth={depth!r} must be a whole number, 0 or more")
    targets = follows = next_token_targets(idx, positions=positions)
    for _ in range(depth):
        later = torch.full_like(idx, IGNORE)
        later[:, :-1] = targets[:, 1:]
        targets = later.masked_fill(follows == IGNORE, IGNORE)
    return targets
