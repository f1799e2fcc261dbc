r"""Multi-token prediction: a part of the model that predicts the token after the next one.

A causal model turns the tokens up to :math:`x_i` into a state :math:`h_i`, and that into the
probabilities of :math:`x_{i+1}`. Once :math:`x_{i+1}` is known, a small module goes on from the
finished state: it joins it with the embedding of that token, runs one block, and lets the model's
own head say what :math:`x_{i+2}` is. Depth d goes on from depth d - 1 in the same way:

.. math::

   u^d_i = M_d \, [\, \mathrm{RMSNorm}(E_{x_{i+d}}) ;\; \mathrm{RMSNorm}(h^{d-1}_i) \,], \qquad
   h^d_i = \mathrm{RMSNorm}(\mathrm{Block}_d(u^d)_i), \qquad
   p(x_{i+d+1}) = \mathrm{softmax}(W h^d_i)

with :math:`h^0_i` the model's state after its last norm; E and W are the model's own embedding and
head. Column i of depth d has seen the tokens up to :math:`x_{i+d}` and none after them.

Shapes: B batch, T tokens, C features, V vocabulary.

Sources: Gloeckle et al., *Better & Faster Large Language Models via Multi-token Prediction*, 2024,
arXiv:2404.19737 (parallel heads); DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024,
arXiv:2412.19437 (this chain; the formula there has the state first, the published weights the
embedding).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE, Cache, LayerCache
from lm_from_scratch.limits import Count, require
from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM


class MTPLayer(nn.Module):
    """One depth: two norms, the projection of both results (2C to C), a block like the model's
    last one, and a norm before the shared head."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        super().__init__()
        config, norm = model.config, type(model.backbone.norm)
        C, eps = config.n_embd, config.rms_norm_eps
        self.enorm = norm(C, eps)
        self.hnorm = norm(C, eps)
        self.eh_proj = nn.Linear(2 * C, C, bias=False)
        self.mtp_block = model.backbone.block(config.n_layer - 1)
        self.post_norm = norm(C, eps)

    def forward(
        self,
        x: Tensor,
        h: Tensor,
        rotation: tuple[Tensor, Tensor],
        visibility: Visibility,
        cache: LayerCache,
    ) -> Tensor:
        """States (B, T, C) of this depth, from the embeddings ``x`` (B, T, C) of the tokens that
        are now known and the states ``h`` (B, T, C) of the depth before."""
        u = self.eh_proj(torch.cat([self.enorm(x), self.hnorm(h)], dim=-1))  # (B, T, C)
        return self.post_norm(self.mtp_block(u, rotation, visibility, cache))


class MTP(nn.Module):
    """The layers of ``n_depth`` depths for a ``model``, in its dtype and on its device.

    It holds no embedding and no head: the model is given with every call, and shares its own.
    Raises ``ValueError`` for a model without rotary positions.
    """

    def __init__(self, model: Qwen2ForCausalLM, n_depth: int = 1) -> None:
        super().__init__()
        require(Count, n_depth=n_depth)
        if not isinstance(model, Qwen2ForCausalLM):
            raise ValueError(
                f"model={type(model).__name__} is not supported, only Qwen2 and what came after it"
            )
        self.n_embd, self.window = model.config.n_embd, model.config.windows[-1]
        self.layers = nn.ModuleList(MTPLayer(model) for _ in range(n_depth))
        self.init_weights(model.config.initializer_range)
        self.to(model.head.weight)

    @torch.no_grad()
    def init_weights(self, initializer_range: float) -> None:
        """Matrices from N(0, initializer_range²), biases 0; the rest stays as it was made."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() > 1:
                parameter.normal_(0.0, initializer_range)

    def forward(
        self,
        model: Qwen2ForCausalLM,
        h: Tensor,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> list[Tensor]:
        """The states (B, T, C) of every depth, from the model's own, ``h`` (B, T, C), for ``idx``
        at ``positions`` and in ``documents`` (B, T).

        The last d columns of depth d lack a token that ``idx`` does not hold, and mean nothing; so
        do the last d of each document. No other column sees them, and
        :func:`~lm_from_scratch.text.targets.mtp_targets` gives them no target.
        """
        states = []
        for depth in range(1, len(self.layers) + 1):
            known = F.pad(idx[:, depth:], (0, min(depth, idx.shape[1])))  # (B, T): x_{i + depth}
            h = self.step(model, depth, h, known, positions=positions, documents=documents)
            states.append(h)
        return states

    def step(
        self,
        model: Qwen2ForCausalLM,
        depth: int,
        h: Tensor,
        known: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        """The states (B, T, C) of one ``depth``, from those of the depth before, ``h`` (B, T, C),
        and the tokens that have become ``known`` (B, T), ``depth`` after each column's own. Columns
        stand at the ``positions`` (B, T) and in the ``documents`` (B, T) of their own tokens; the
        ``cache`` has one layer.

        Raises ``ValueError`` for states and tokens that do not fit.
        """
        if h.shape != (*known.shape, self.n_embd):
            raise ValueError(
                f"the states have shape {tuple(h.shape)}; for tokens of shape "
                f"{tuple(known.shape)} they must be {(*known.shape, self.n_embd)}"
            )
        (seen,) = cache.see(h, positions, documents, [self.window])
        rotation = model.backbone.rotary_emb(seen.query_positions, h.dtype)
        x = model.backbone.embed_tokens(known)
        return self.layers[depth - 1](x, h, rotation, seen, cache[0])
