"""Multi-head latent attention, both of its forms, with experts behind a router by sigmoid."""

import pytest
import torch
from caches import in_chunks
from model_laws import DOUBLE, ROWS, exact, laws_of, load, near, noise
from mutation import Mutant, killer, mutants

from lm_from_scratch.attention import latent as mla
from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.weights.lora import add_lora_


def both_orders() -> None:
    """Absorbed is expanded, in float64, in value and gradient."""
    B, H, T, S, R, Dn, Dr, Dv = 2, 3, 4, 7, 9, 5, 4, 6
    shapes = (B, H, T, Dn + Dr), (B, 1, S, R), (B, 1, S, Dr), (H * (Dn + Dv), R)
    leaves = [noise(*shape, seed=i, dtype=DOUBLE) for i, shape in enumerate(shapes)]
    q, latent, shared, weight = (x.requires_grad_() for x in leaves)
    keys = torch.arange(S)[None].repeat(B, 1)
    keys[1, :2] = -1
    how = Visibility(keys[:, S - T :], keys), formula_attention
    absorbed = mla.absorbed(q, latent, shared, weight, *how)
    expanded = mla.expanded(q, latent @ weight.T, shared, *how)
    exact(absorbed, expanded)
    grad = noise(B, H, T, Dv, seed=9, dtype=DOUBLE)
    exact(torch.autograd.grad(absorbed, leaves, grad), torch.autograd.grad(expanded, leaves, grad))


@torch.no_grad()
def an_adapter_counts() -> None:
    """Low rank beside the matrix that would be absorbed: in pieces and at once."""
    model = load("deepseek_v3")
    add_lora_(model, rank=2, select=lambda name: "kv_b_proj" in name)
    for name, p in model.named_parameters():
        if name.endswith("lora_b"):
            p.copy_(0.5 * noise(*p.shape))
    idx = torch.tensor(ROWS[:1])
    near(in_chunks(idx, [5, 1, 3, 3], model=model), model(idx))


@torch.no_grad()
def few_numbers_are_kept() -> None:
    """Of a token and a layer the latent and one turned key, however many heads there are."""
    model, cache = load("deepseek_v3"), GrowingCache(3, reserve=12)
    model(torch.tensor(ROWS[:1]), cache=cache)
    assert cache.nbytes == 12 * 3 * (16 + 4) * 4


LAWS = laws_of("deepseek_v3") | {
    "absorbed = expanded": both_orders, "adapter": an_adapter_counts, "bytes": few_numbers_are_kept
}  # fmt: skip

KEPT = "\n        latent, shared = cache.update(latent, shared)"

MISTAKES = {
    "models.deepseek_v3:LatentAttention.forward": [
        ("the latent not normed", "self.kv_a_layernorm(latent)", "latent"),
        ("the latent normed again when it is read",
         "how = visibility", "latent = self.kv_a_layernorm(latent)\n        how = visibility"),
        ("the shared key not turned", "self.rotate(shared, *rotation)", "shared"),
        ("kept bare, turned by the places of the queries", f"self.rotate(shared, *rotation){KEPT}",
         f"shared{KEPT}\n        places = slice(-1 if T != shared.shape[2] else 0, None)\n"
         "        shared = self.rotate(shared, *(angle[..., places, :] for angle in rotation))"),
        ("the first features of a query turned", "q, turned = q.tensor_split([Dn], dim=-1)",
         "turned, q = q.tensor_split([self.sizes[2]], dim=-1)"),
        ("sharpness of turned features alone", "q * self.sharpness",
         "torch.cat([q[..., :Dn], q[..., Dn:] * self.sharpness], dim=-1)"),
        ("no sharpness", "q * self.sharpness", "q"),
        ("an adapter is passed over", "plain_matrix(self.kv_b_proj)", "self.kv_b_proj.weight"),
    ],
    "models.deepseek_v3:LatentAttention.queries": [
        ("queries not normed", "self.q_a_layernorm(self.q_a_proj(x))", "self.q_a_proj(x)"),
    ],
    "models.deepseek_v3:sharpness": [("sharpness not squared", " ** 2", "")],
    "models.deepseek_v3:LatentAttention.__init__": [
        ("pairs half-split", "apply_rope_interleaved if config.rope_interleave else ", ""),
        ("the norms take the config's eps", "eps=1e-6", "eps=config.rms_norm_eps", 2),
    ],
    "attention.latent:absorbed": [
        ("absorbed scores over the root of R + Dr", "q * math.sqrt((R + Dr) / D)", "q"),
        ("absorbed scores over the root of R", "math.sqrt((R + Dr) / D)", "math.sqrt(R / D)"),
        ("the matrix of the next head", "@ w_k,", "@ w_k.roll(1, 0),"),
        ("values of the first head", "w_v.mT", "w_v[:1].mT"),
    ],
    "attention.latent:expanded": [
        ("all keys, then all values", "kv.view(B, S, H, -1)",
         "torch.cat([x.reshape(B, S, H, -1) for x in kv.tensor_split([H * (D - Dr)], -1)], -1)"),
        ("a shared key for the first head alone",
         "shared.expand(-1, H, -1, -1)", "torch.nn.functional.pad(shared, (0, 0, 0, 0, 0, H - 1))"),
    ],
    "layers.experts:SigmoidRouter.forward": [
        ("the layer without a bias for experts",
         "self.e_score_correction_bias.to", "torch.zeros_like(self.e_score_correction_bias).to"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
