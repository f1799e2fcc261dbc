r"""The gated delta rule: a memory of fixed size that is read, corrected and written.

A head keeps a matrix :math:`S` (Dk, Dv), which answers a key with a value. Each token lets all of
it fade by :math:`\alpha_t = e^{g_t}`, reads what it says for the key, and writes the *difference*
to the value that it should say:

.. math::

   u_t &= \beta_t \, (v_t - \alpha_t S_{t-1}^\top k_t) \\
   S_t &= \alpha_t S_{t-1} + k_t u_t^\top, \qquad o_t = S_t^\top q_t

With keys of length 1 and :math:`\beta_t = 1` the memory says exactly :math:`v_t` for :math:`k_t`
from then on, and a key that is written again has its new value. Plain linear attention writes
:math:`v_t` itself, and reads the sum of both.

**In chunks.** Let C tokens begin with the state :math:`S_0`, let :math:`c_i` be the sum of their
first i gates, and :math:`\gamma_{ij} = e^{c_i - c_j}` what is left at token i of what token j
wrote. All states of the chunk are :math:`S_i = e^{c_i} S_0 + \sum_{j \le i} \gamma_{ij} k_j
u_j^\top`. In the first line above they give C equations for the C rows of :math:`U`, in which each
row depends on those before it:

.. math::

   u_i + \beta_i \sum_{j < i} \gamma_{ij} (k_i \cdot k_j) \, u_j
   = \beta_i \, (v_i - e^{c_i} S_0^\top k_i)

This is a triangular system, solved at once; outputs and the next state are matrix products then. A
sequence takes T / C steps in place of T.

Shapes: B batch, H heads, T tokens, Dk features of a key, Dv of a value.

Sources: Schlag et al., *Linear Transformers Are Secretly Fast Weight Programmers*, 2021,
arXiv:2102.11174; Yang et al., *Parallelizing Linear Transformers with the Delta Rule over Sequence
Length*, 2024, arXiv:2406.06484; Yang et al., *Gated Delta Networks*, 2024, arXiv:2412.06464.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

#: Takes q, k, v, g, beta, state and forget; returns the outputs and the new state.
DeltaRule = Callable[..., tuple[Tensor, Tensor]]

#: Tokens of a chunk.
CHUNK = 64


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    forget: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule as written above, token after token: outputs (B, H, T, Dv), and the state after them
    (B, H, Dk, Dv).

    q and k are (B, H, T, Dk), v (B, H, T, Dv), the gates ``g`` (at most 0) and ``beta`` (B, H, T).
    Where ``forget`` (B, T) is True the state is emptied *before* the token: a document begins.
    Computed in float32 at least, in which the new state stays. Raises ``ValueError`` for shapes
    that do not agree.
    """
    dtype = v.dtype
    q, k, v, g, beta, state = _in_float32(q, k, v, g, beta, state, forget)
    decay = g.exp()
    if forget is not None:
        decay = decay.masked_fill(forget[:, None], 0.0)
    outputs = []
    with _no_autocast(state):
        for t in range(q.shape[2]):
            key = k[:, :, t, :, None]  # (B, H, Dk, 1)
            state = decay[:, :, t, None, None] * state
            said = key.mT @ state  # (B, H, 1, Dv): what the memory says for this key
            state = state + key @ (beta[:, :, t, None, None] * (v[:, :, t, None] - said))
            outputs.append(q[:, :, t, None] @ state)
    return torch.cat(outputs, dim=2).to(dtype), state


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    forget: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """:func:`recurrent_delta_rule`, ``chunk`` tokens at a time.

    The arguments are the same: ``q`` and ``k`` (B, H, T, Dk), ``v`` (B, H, T, Dv), ``g`` and
    ``beta`` (B, H, T), ``state`` (B, H, Dk, Dv), ``forget`` (B, T). Raises ``ValueError`` for a
    ``chunk`` that is no whole number of at least 1.
    """
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"chunk={chunk} must be a whole number of at least 1")
    dtype = v.dtype
    q, k, v, g, beta, state = _in_float32(q, k, v, g, beta, state, forget)
    outputs = []
    with _no_autocast(state):
        for start in range(0, q.shape[2], chunk):
            now = slice(start, start + chunk)
            begins = None if forget is None else forget[:, now]
            tokens = q[:, :, now], k[:, :, now], v[:, :, now]
            y, state = _one_chunk(*tokens, g[:, :, now], beta[:, :, now], state, begins)
            outputs.append(y)
    return torch.cat(outputs, dim=2).to(dtype), state


def _one_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    forget: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The C tokens of a chunk at once, from the ``state`` before it."""
    c = g.cumsum(dim=-1)  # (B, H, C)
    # left at token i of what token j wrote, or had been there before the chunk; 0 for the future
    future = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    gamma = (c[..., :, None] - c[..., None, :]).masked_fill(future, -torch.inf).exp()
    before = c.exp()[..., None]  # (B, H, C, 1)
    if forget is not None:
        document = forget.cumsum(dim=-1)[:, None]  # (B, 1, C): 0 is the one that was begun before
        gamma = gamma * (document[..., :, None] == document[..., None, :])
        before = before * (document == 0)[..., None]
    # row i of the system: u_i, and the rows before it
    system = beta[..., None] * gamma * (k @ k.mT)  # its diagonal is taken for 1
    wanted = beta[..., None] * (v - before * (k @ state))  # (B, H, C, Dv)
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    y = before * (q @ state) + (gamma * (q @ k.mT)) @ u
    last = gamma[..., -1, :, None]  # (B, H, C, 1): what is left of each at the end
    return y, before[:, :, -1:] * state + (last * k).mT @ u


def _in_float32(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    forget: Tensor | None,
) -> Iterator[Tensor]:
    """The tensors in the dtype in which to compute. Raises ``ValueError`` for shapes that do not
    agree."""
    B, H, T, Dk = k.shape
    wanted = {
        "q": (q, (B, H, T, Dk)),
        "v": (v, (B, H, T, v.shape[-1])),
        "g": (g, (B, H, T)),
        "beta": (beta, (B, H, T)),
        "state": (state, (B, H, Dk, v.shape[-1])),
        **({} if forget is None else {"forget": (forget, (B, T))}),
    }
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, for keys {(B, H, T, Dk)} {shape}")
    work = torch.promote_types(v.dtype, torch.float32)
    return (x.to(work) for x in (q, k, v, g, beta, state))


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Products in the dtype of their factors, which autocast would round."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


def unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Vectors ``x`` (..., D) of length 1, up to ``eps`` below the root; in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + eps)
