"""The gated delta rule, its layer, and a model in which two of three layers have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from since_qwen2.whole_models import (
    DOUBLE,
    ROWS,
    Ideas,
    Laws,
    Rows,
    built,
    exact,
    first,
    near,
    noise,
    whole,
)
from tiny_models import token_ids
from torch import Tensor

from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.layers import delta_rule
from lm_from_scratch.layers.norm import rms_norm
from lm_from_scratch.layers.short_convolution import short_convolution

# --------------------------------------------------------------------------------------------- laws

B, H, DK, DV, T = 2, 3, 5, 7, 70


def rule_inputs() -> list[Tensor]:
    """q, k, v, g, beta and a state that is not empty."""
    shapes = (B, H, T, DK), (B, H, T, DK), (B, H, T, DV), (B, H, T), (B, H, T), (B, H, DK, DV)
    q, k, v, g, beta, state = (noise(*s, seed=i, dtype=DOUBLE) for i, s in enumerate(shapes))
    return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -g.abs(), beta.sigmoid(), state]


@cache
def by_definition() -> tuple[Tensor, Tensor]:
    """S <- alpha (I - beta k k^T) S + beta k v^T, and o = S^T q."""
    q, k, v, g, beta, S = rule_inputs()
    outputs = []
    for t in range(T):
        key, rate = k[:, :, t, :, None], beta[:, :, t, None, None]
        keep = torch.eye(DK, dtype=DOUBLE) - rate * key @ key.mT
        S = g[:, :, t, None, None].exp() * keep @ S + rate * key @ v[:, :, t, None]
        outputs.append((S.mT @ q[:, :, t, :, None])[..., 0])
    return torch.stack(outputs, dim=2), S


@cache
def of_rule() -> tuple[Tensor, Tensor]:
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    *tokens, state = (x.float() for x in rule_inputs())
    y, last = hf.torch_recurrent_gated_delta_rule(
        *(x.transpose(1, 2) for x in tokens), initial_state=state, output_final_state=True
    )
    return y.transpose(1, 2), last


def rule(name: str) -> None:
    found = getattr(delta_rule, name)(*rule_inputs())
    exact(found, by_definition())
    near((found[0].float() * DK**-0.5, found[1].float()), of_rule(), 5e-5)


def in_parts(name: str) -> None:
    *tokens, state = rule_inputs()
    outputs = []
    for part in (slice(0, 33), slice(33, 34), slice(34, T)):
        y, state = getattr(delta_rule, name)(*(x[:, :, part] for x in tokens), state)
        outputs.append(y)
    exact((torch.cat(outputs, dim=2), state), by_definition())


def documents(name: str) -> None:
    """Each begins with nothing."""
    *tokens, state = rule_inputs()
    forget = torch.zeros(B, T, dtype=torch.bool)
    forget[:, [0, 40, 66]] = True
    y, last = getattr(delta_rule, name)(*tokens, state, forget)
    for start, end in ((0, 40), (40, 66), (66, T)):
        part = [x[:, :, start:end] for x in tokens]
        alone, after = delta_rule.recurrent_delta_rule(*part, torch.zeros_like(state))
        exact(y[:, :, start:end], alone)
    exact(last, after)


@torch.no_grad()
def padding_anywhere() -> None:
    """Real tokens are what they are alone, and so is the state after them."""
    model = built("hybrid").double()
    real = noise(2, 30, seed=4) < 0.5
    idx, positions = token_ids(2, 30), torch.where(real, real.cumsum(1) - 1, -1)
    found, cache = model(idx, positions=positions), cache_for(model.config.windows)
    model(idx, positions=positions, cache=cache)
    for row in range(2):
        own, text = cache_for(model.config.windows), idx[row, real[row]][None]
        exact(found[row, real[row]], model(text, cache=own)[0])
        for held, want in zip(cache.states[0], own.states[0], strict=True):
            exact(held[row], want[0])


@torch.no_grad()
def memory_keeps_its_digits() -> None:
    """In a model of 16 bits, too, the memory is float32: it adds up many tokens."""
    model = built("hybrid").bfloat16()
    cache = cache_for(model.config.windows)
    model(torch.tensor(ROWS[:1]), cache=cache)
    assert cache.states[0][1].dtype == torch.float32


LAWS: Laws = whole("hybrid") | {
    **{
        f"{law.__name__} {n[:5]}": partial(law, n)
        for law in (rule, in_parts, documents)
        for n in ("recurrent_delta_rule", "chunk_delta_rule")
    },
    "padding anywhere": padding_anywhere,
    "16 bits": memory_keeps_its_digits,
}

# ----------------------------------------------------------------------------------------- mistakes


def recurrent(
    read: Callable[..., Tensor] = lambda key, state, faded: key.mT @ faded,
    write: Callable[..., Tensor] = lambda rate, v, said: rate * (v - said),
    answer: Callable[..., Tensor] = lambda q, before, after: q @ after,
    faded: Callable[..., Tensor] = lambda decay, state: decay * state,
) -> Any:
    """The rule token after token, given what the memory says, what is written, and the answer."""

    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, forget: Any = None
    ) -> tuple[Tensor, Tensor]:
        decay = g.exp() if forget is None else g.exp().masked_fill(forget[:, None], 0.0)
        outputs = []
        for t in range(q.shape[2]):
            key, before = k[:, :, t, :, None], state
            state = faded(decay[:, :, t, None, None], state)
            u = write(beta[:, :, t, None, None], v[:, :, t, None], read(key, before, state))
            state = state + key @ u
            outputs.append(answer(q[:, :, t, None], before, state))
        return torch.cat(outputs, dim=2), state

    return rule


def one_chunk(
    seen: int = 1,
    system: Callable[..., Tensor] = lambda beta, gamma, kk: beta[..., None] * gamma * kk,
    said: Callable[..., Tensor] = lambda before, ks: before * ks,
    kept: Callable[..., Tensor] = lambda before, gamma: before * gamma,
    left: Callable[..., Tensor] = lambda gamma: gamma[..., -1, :, None],
    faded: Callable[..., Tensor] = lambda before: before[:, :, -1:],
    documents: bool = True,
) -> Any:
    """A chunk at once, given its system of equations, and what is left of the state."""

    def chunk(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, forget: Any
    ) -> tuple[Tensor, Tensor]:
        c = g.cumsum(dim=-1)
        future = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool).triu(seen)
        gamma = (c[..., :, None] - c[..., None, :]).masked_fill(future, -torch.inf).exp()
        before = c.exp()[..., None]
        if forget is not None:
            document = forget.cumsum(dim=-1)[:, None]
            if documents:
                gamma = gamma * (document[..., :, None] == document[..., None, :])
            before = before * (document == 0)[..., None]
        wanted = beta[..., None] * (v - said(before, k @ state))
        u = torch.linalg.solve_triangular(
            system(beta, gamma, k @ k.mT), wanted, upper=False, unitriangular=True
        )
        y = before * (q @ state) + (gamma * (q @ k.mT)) @ u
        return y, faded(before) * state + (left(gamma) * k).mT @ u

    return chunk


def convolved(
    taps: Callable[[Tensor], Tensor] = lambda w: w,
    state: Callable[[Tensor], Tensor] = lambda s: s,
    kept: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda x, before, after: after,
    skipped: bool = True,
) -> Any:
    """The short convolution, given its taps, and the states before and after."""

    def convolution(
        x: Tensor, weight: Tensor, before: Tensor, positions: Any, documents: Any
    ) -> tuple[Tensor, Tensor]:
        where = (positions, documents) if skipped or documents is not None else (None, None)
        y, after = short_convolution(x, taps(weight), state(before), *where)
        return y, kept(x, before, after)

    return convolution


def at_gates(change: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    def gates(self: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        g, beta = change(self, a.to(self.A_log), b.to(self.A_log))
        return g.transpose(1, 2), beta.transpose(1, 2)

    return gates


def fade(self: Any, a: Tensor) -> Tensor:
    return -self.A_log.exp() * F.softplus(a + self.dt_bias)


def at_heads(
    unit: Any = delta_rule.unit_length,
    scale: Callable[[int], float] = lambda D: D**-0.5,
    share: Callable[[Tensor, int], Tensor] = lambda x, n: x.repeat_interleave(n, dim=1),
) -> Any:
    """Heads of q, k and v, given their lengths, and how value heads share a key head."""

    def heads(self: Any, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (B, T, _), keys = qkv.shape, self.n_key_head * self.key_dim
        q, k, v = qkv.split([keys, keys, qkv.shape[2] - 2 * keys], dim=-1)
        q, k = (unit(x.view(B, T, -1, self.key_dim)).transpose(1, 2) for x in (q, k))
        n = self.n_value_head // self.n_key_head
        q, k = share(q * scale(self.key_dim), n), share(k, n)
        return q, k, v.view(B, T, -1, self.value_dim).transpose(1, 2)

    return heads


def at_norm(change: Callable[..., Tensor]) -> Any:
    return lambda self, x, gate: change(self, x, gate.to(x)).to(x.dtype)


def padding_is_written(self: Any, x: Tensor, visibility: Any, cache: Any) -> Tensor:
    """The convolution skips padding; the memory does not."""
    inputs, memory = cache.state(*self.initial_state(x))
    positions = None if visibility.dense else visibility.query_positions.expand(x.shape[:2])
    documents = visibility.query_documents
    qkv, z, a, b = self.project(x)
    qkv, inputs = short_convolution(qkv, self.conv1d.weight[:, 0], inputs, positions, documents)
    forget = positions == 0 if documents is not None and positions is not None else None
    y, memory = self.delta_rule(
        *self.heads(self.activation(qkv)), *self.gates(a, b), memory, forget
    )
    cache.keep(inputs, memory)
    return self.out_proj(self.norm(y.transpose(1, 2), z).flatten(2))


def memory_as_the_model(*given: Any, rule: Any = delta_rule.chunk_delta_rule) -> Any:
    return tuple(x.to(given[2].dtype) for x in rule(*given))


TOKEN, CHUNK = "layers.delta_rule:recurrent_delta_rule", "layers.delta_rule:_one_chunk"
NET = "models.gated_delta_net:GatedDeltaNet"
CONV, GATED_NORM = (
    "models.gated_delta_net:short_convolution",
    "models.gated_delta_net:GatedRMSNorm.forward",
)
SAME: Rows = [
    ("token after token", TOKEN, recurrent()),
    ("a chunk", CHUNK, one_chunk()),
    (
        "the reading fades, not the memory read",
        TOKEN,
        recurrent(read=lambda key, state, faded: key.mT @ faded),
    ),
    ("the convolution", CONV, convolved()),
    ("the gates", f"{NET}.gates", at_gates(lambda self, a, b: (fade(self, a), b.sigmoid()))),
    ("the heads", f"{NET}.heads", at_heads()),
    (
        "chunks of several sizes",
        "models.gated_delta_net:chunk_delta_rule",
        partial(delta_rule.chunk_delta_rule, chunk=3),
    ),
    (
        "tokens in the place of chunks",
        "models.gated_delta_net:chunk_delta_rule",
        delta_rule.recurrent_delta_rule,
    ),
]
MUTANTS: Rows = [
    ("no correction: linear attention", TOKEN, recurrent(write=lambda rate, v, said: rate * v)),
    ("read before it fades", TOKEN, recurrent(read=lambda key, state, faded: key.mT @ state)),
    ("beta for the value alone", TOKEN, recurrent(write=lambda rate, v, said: rate * v - said)),
    ("answered before it is written", TOKEN, recurrent(answer=lambda q, before, after: q @ before)),
    ("nothing fades", TOKEN, recurrent(faded=lambda decay, state: state)),
    ("no correction inside a chunk", CHUNK, one_chunk(system=lambda beta, gamma, kk: 0 * kk)),
    (
        "nothing fades in the system",
        CHUNK,
        one_chunk(system=lambda b, gamma, kk: b[..., None] * kk.tril()),
    ),
    (
        "beta of the column",
        CHUNK,
        one_chunk(system=lambda b, gamma, kk: b[..., None, :] * gamma * kk),
    ),
    ("what was before the chunk does not fade", CHUNK, one_chunk(said=lambda before, ks: ks)),
    ("a token sees the next", CHUNK, one_chunk(seen=2)),
    ("a token does not see itself", CHUNK, one_chunk(seen=0)),
    (
        "what a chunk wrote does not fade",
        CHUNK,
        one_chunk(left=lambda gamma: torch.ones_like(gamma[..., -1, :, None])),
    ),
    (
        "the state does not fade",
        CHUNK,
        one_chunk(faded=lambda before: torch.ones_like(before[:, :, -1:])),
    ),
    ("documents of a chunk read one another", CHUNK, one_chunk(documents=False)),
    ("taps in the other order", CONV, convolved(taps=lambda w: w.flip(-1))),
    ("no state for the convolution", CONV, convolved(state=torch.zeros_like)),
    (
        "the first inputs kept, not the last",
        CONV,
        convolved(kept=lambda x, before, after: torch.cat([before, x], 1)[:, : before.shape[1]]),
    ),
    ("the convolution reads padding", CONV, convolved(skipped=False)),
    ("padding is written", f"{NET}.forward", padding_is_written),
    (
        "A, not its exponential",
        f"{NET}.gates",
        at_gates(
            lambda self, a, b: (-self.A_log.abs() * F.softplus(a + self.dt_bias), b.sigmoid())
        ),
    ),
    (
        "no bias for the step",
        f"{NET}.gates",
        at_gates(lambda self, a, b: (-self.A_log.exp() * F.softplus(a), b.sigmoid())),
    ),
    (
        "a and b exchanged",
        f"{NET}.gates",
        at_gates(lambda self, a, b: (fade(self, b), a.sigmoid())),
    ),
    ("keys of any length", f"{NET}.heads", at_heads(unit=first)),
    ("queries not scaled", f"{NET}.heads", at_heads(scale=lambda D: 1.0)),
    ("key heads tiled", f"{NET}.heads", at_heads(share=lambda x, n: x.repeat(1, n, 1, 1))),
    (
        "gated before the norm",
        GATED_NORM,
        at_norm(lambda self, x, z: rms_norm(x * F.silu(z), self.weight, self.eps)),
    ),
    (
        "the norm gated by sigmoid",
        GATED_NORM,
        at_norm(lambda self, x, z: rms_norm(x, self.weight, self.eps) * z.sigmoid()),
    ),
    ("the memory in 16 bits", "models.gated_delta_net:chunk_delta_rule", memory_as_the_model),
]


IDEAS: Ideas = {"delta rule": (LAWS, SAME, MUTANTS)}
