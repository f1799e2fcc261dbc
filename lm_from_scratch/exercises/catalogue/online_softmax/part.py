"""Your attention in tiles, in blocks 1, 3, 5, ...: one head at a time, in tiles of 16 keys."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.exercises.parts import Machine, Part


def put(machine: Machine, tiled_attention: Callable[..., Any]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        rows = [
            torch.stack([tiled_attention(*head, visible[0], 16) for head in zip(*row, strict=True)])
            for *row, visible in zip(q, k, v, mask.expand(len(q), -1, -1, -1), strict=True)
        ]
        return torch.stack(rows)

    machine.attends[1::2] = [attend] * len(machine.attends[1::2])


PART = Part("attention in tiles, in odd blocks", put, apart=("learn",))
