"""Multi-head latent attention, both of its forms, with experts behind a router by sigmoid."""

import pytest
from model_laws import laws_of
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

FILES = "unit/attention/test_latent.py", "unit/models/test_deepseek_v3.py"
LAWS = laws_of("deepseek_v3") | laws_in(*FILES, names="agree|adapters")

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
