r"""
Multi-token prediction in depth
===============================

The lesson on `multi-token prediction <8_multi_token_prediction.ipynb>`_ lets a model draft for itself. Does our part
compute what ``transformers`` does, and how can we be sure that it never sees its answer? Are three depths better than
one depth that is used three times, and does the extra loss help the model itself?

In the formulas, :math:`x_i` is token i, :math:`h^d_i` the state of depth d at column i, E the embedding, W the head.

The chain
---------

Depth 0 is the model, and :math:`h^0_i` its state after the last norm. Depth d joins the state of the depth before with
the embedding of one more token:

.. math::

   u^d_i &= M_d \, [\, \mathrm{RMSNorm}(E_{x_{i+d}}) ;\; \mathrm{RMSNorm}(h^{d-1}_i) \,] \\
   h^d_i &= \mathrm{RMSNorm}(\mathrm{Block}_d(u^d)_i) \\
   p(x_{i+d+1}) &= \mathrm{softmax}(W h^d_i)
"""

# sphinx_gallery_words = ["MtpModel", "use_mtp", "num_nextn_predict_layers", "eh_proj", "enorm", "hnorm", "shared_head", "EAGLE"]
import statistics
from itertools import chain
from unittest.mock import patch

import torch
import torch.nn.functional as F

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.generation import mtp_drafter
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.mtp_drafter import MTPDrafter
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.generation.speculative import speculate
from lm_from_scratch.models.mtp import MTP
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.models.randomize import randomize_
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.text.targets import IGNORE, mtp_targets, next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss
from lm_from_scratch.training.mtp_loss import mtp_losses

sizes = dict(
    vocab_size=256, block_size=96, n_layer=2, n_head=4, n_kv_head=2, n_embd=64,
    intermediate_size=128, rope_theta=10000.0, eos_token_id=None,
)  # fmt: skip
model = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
mtp = MTP(model, n_depth=3).eval()
randomize_(model)
randomize_(mtp, seed=1)

# %%
# The same in transformers
# ------------------------
#
# ``transformers`` has these layers for the checkpoints that hold them, built of the blocks of whatever model they belong
# to. We give its layers our weights. It counts a column from its newest token and we from its own; rotation sees
# differences alone.

from transformers import Qwen2Config as HFConfig
from transformers import Qwen2ForCausalLM as HFModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

config = HFConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=96,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=True, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    num_mtp_layers=3, mtp_layer_types=["full_attention"] * 3,
)  # fmt: skip
theirs = HFModel(config).eval()
theirs.load_state_dict(model.state_dict(), strict=False)
layers = MtpModel(theirs, 3).eval()
print(layers.load_state_dict(mtp.state_dict(), strict=False).unexpected_keys)

idx = torch.randint(256, (1, 24), generator=torch.Generator().manual_seed(0))
cache, places = MtpCache(config=config.get_mtp_config()), torch.arange(24)[None]
with torch.no_grad():
    states = mtp(model, model.model(idx), idx)
    hidden = theirs.model(idx).last_hidden_state
    for depth, mine in enumerate(states, 1):
        known = F.pad(idx[:, depth:], (0, depth))
        hidden = layers.forward_layer(
            depth - 1, hidden, places + depth, cache, input_ids=known
        )
        apart = (mine - hidden).abs().max().item()
        print(f"depth {depth}: largest difference {apart:.0e}")
        torch.testing.assert_close(mine, hidden, atol=5e-5, rtol=0)

# %%
# What a depth may see
# --------------------
#
# Column i of depth d has seen the tokens up to :math:`x_{i+d}`, and must predict the one after. So if we change token j,
# the first column that may change is :math:`j - d`. Its target is token j + 1.

double, layers64 = model.double(), mtp.double()
print("token 12 changed; first column that changes:")
with torch.no_grad():
    before = layers64(double, double.model(idx), idx)
    other = idx.clone()
    other[0, 12] = (idx[0, 12] + 1) % 256
    after = layers64(double, double.model(other), other)
    for depth in (1, 2, 3):
        changed = (after[depth - 1] - before[depth - 1]).abs().amax(-1)[0] > 0
        first = int(changed.nonzero()[0, 0])
        target = int(mtp_targets(torch.arange(24)[None], depth)[0, first])
        print(f"depth {depth}: column {first}, whose target is token {target}")
        assert first == 12 - depth and target == 13
model, mtp = model.float(), mtp.float()

# %%
# Where documents are packed into a row, the last d + 1 columns of each have no target. The targets of depth d follow from
# those of depth d - 1, one column later, if that column belongs to the same document.

row = torch.tensor([[5, 6, 7, 8, 9, 10]])
packed = torch.tensor([[0, 1, 2, 3, 0, 1]])
for depth in (0, 1, 2):
    targets = mtp_targets(row, depth, positions=packed)[0].tolist()
    print(
        f"depth {depth}:",
        *("  –" if t == IGNORE else f"{t:3}" for t in targets),
    )
assert targets == [8, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]
assert torch.equal(mtp_targets(row, 0), next_token_targets(row))

# %%
# Does it help the model?
# -----------------------
#
# DeepSeek-V3 adds the mean of these losses, times 0.3 and later 0.1, to the usual one, and reports better benchmarks. We
# train a model of two blocks on the bytes of Python's language reference, with the extra loss of three depths and
# without, from two seeds each. Within a seed, the starting weights and the batches are the same.

train, held_out = split(load_corpus("reference"))
data = torch.frombuffer(
    bytearray("\n\n".join(d.text for d in train).encode()), dtype=torch.uint8
)
text = torch.frombuffer(
    bytearray("\n\n".join(d.text for d in held_out).encode()), dtype=torch.uint8
).long()
rows = text[: len(text) // 96 * 96].view(-1, 96)[:48]


def trained(seed, weight, steps=40):
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.1))
    mtp = MTP(model, 3)
    draw = torch.Generator().manual_seed(seed)
    parameters = [*model.parameters(), *mtp.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    for step in range(steps):
        starts = torch.randint(len(data) - 64, (5,), generator=draw).tolist()
        idx = torch.stack([data[a : a + 64] for a in starts]).long()
        h = model.model(idx)
        loss = causal_lm_loss(h @ model.head.weight.T, next_token_targets(idx))
        if weight:
            loss = (
                loss
                + weight * torch.stack(mtp_losses(model, mtp, h, idx)).mean()
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
    return model.eval().requires_grad_(False), mtp.eval().requires_grad_(False)


def held_out_loss(model):
    with torch.no_grad():
        return causal_lm_loss(model(rows), next_token_targets(rows)).item()


both = [trained(seed, 0.3) for seed in range(2)]
alone = [held_out_loss(trained(seed, 0.0)[0]) for seed in range(2)]
extra = [held_out_loss(model) for model, _ in both]
print("held-out loss of the next byte, in nats, seeds 0 and 1")
print("alone         ", *(f"{loss:.3f}" for loss in alone))
print("extra loss    ", *(f"{loss:.3f}" for loss in extra))
gain = [a - b for a, b in zip(alone, extra)]
print("gain          ", *(f"{g:+.3f}" for g in gain))
assert all(2.5 < loss < 3.4 for loss in alone + extra)
assert max(map(abs, gain)) < 0.2

# %%
# At this size, and after so few steps, the extra loss makes little difference. Nor is it free: every step runs three more
# blocks, and the head three more times. In the same time the model alone would have taken more steps. Gloeckle et al.
# find that the gain grows with the model, and that small models may lose.
#
# Three depths, or one three times
# --------------------------------
#
# With three depths, draft k comes from depth k. With one, its result takes the place of the model's state, and it drafts
# again. The published models ship one depth or a few, and most programs use one depth repeatedly. Both draft for the
# same models here, three bytes before each pass. The text is drawn: greedily, models this small soon repeat a space, and
# every drafter is right.

prompts = [row[:32].tolist() for row in rows[:4]]


def by_place(model, mtp, K=3):
    """The share of accepted drafts, among those reached, at each place; and tokens a pass."""
    reached, stood = [0] * K, [0] * K
    passes = list(speculate(model, MTPDrafter(mtp), prompts, 32, Sampler(), K))
    for p in passes:
        for n, a in zip(p.proposed, p.accepted):
            for k in range(n):
                reached[k] += a >= k
                stood[k] += a > k
    pairs = [
        (n, len(t))
        for p in passes[1:]
        for n, t in zip(p.proposed, p.tokens)
        if n == K
    ]
    tokens = sum(t for _, t in pairs) / len(pairs)
    return [s / max(r, 1) for s, r in zip(stood, reached)], tokens


def first_depth(model, mtp):
    one = MTP(model).eval().requires_grad_(False)
    one.layers[0].load_state_dict(mtp.layers[0].state_dict())
    return one


results = {"three depths": [], "one, three times": []}
for model, mtp in both:
    results["three depths"].append(by_place(model, mtp))
    results["one, three times"].append(by_place(model, first_depth(model, mtp)))
print("accepted at place        1     2     3   tokens a pass (two seeds)")
for name, found in results.items():
    means = [statistics.mean(rates[k] for rates, _ in found) for k in range(3)]
    print(f"{name:20}", *(f"{m:5.2f}" for m in means), end="   ")
    print(*(f"{tokens:5.2f}" for _, tokens in found))
for (three, _), (once, _) in zip(*results.values()):
    assert abs(three[0] - once[0]) < 0.2
    assert 0.2 < three[0] < 0.99
means = [
    statistics.mean(tokens for _, tokens in found) for found in results.values()
]
assert means[1] > means[0] - 0.3
for model, mtp in both:
    said = speculate(model, MTPDrafter(mtp), prompts[:2], 24, GREEDY, 3)
    tokens = zip(*(p.tokens for p in said))
    assert [[*chain.from_iterable(row)] for row in tokens] == complete(
        generate(model, prompts[:2], 24, GREEDY)
    )

# %%
# At the first place both are the same layer, and differ by chance alone. After it, the layer that is used again is hardly
# worse on average than the two that were trained for their places. Greedy text is that of plain decoding for both models.
#
# What checkpoints hold, and what a draft costs
# ---------------------------------------------
#
# DeepSeek-V3 has 61 blocks, and its file a 62nd, ``model.layers.61``: ``enorm``, ``hnorm``, ``eh_proj``, a block with 256
# experts, ``shared_head.norm``, and copies of embedding and head. Qwen3-Next's are called ``mtp.fc``,
# ``mtp.pre_fc_norm_embedding`` and so on. The first is announced in ``config.json``, as ``num_nextn_predict_layers``.
# ``from_pretrained`` reads past both, as ``transformers`` does, and refuses by name what no config speaks of.
#
# From DeepSeek-V3's published numbers follows what one token multiplies, in weights:

C, V, layers_, dense = 7168, 129_280, 61, 3
attention = (
    C * 1536 + 1536 * 128 * 192 + C * 576 + 512 * 128 * 256 + 128 * 128 * C
)
experts = (
    8 + 1
) * 3 * C * 2048 + 256 * C  # 8 of 256 experts, a shared one, the router
head = V * C
of_a_pass = (
    layers_ * attention
    + (layers_ - dense) * experts
    + dense * 3 * C * 18_432
    + head
)
of_a_draft = 2 * C * C + attention + experts + head
held = 2 * C * C + attention + (256 + 1) * 3 * C * 2048 + 256 * C
print(f"a pass       {of_a_pass / 1e9:6.1f} billion")
print(
    f"a draft      {of_a_draft / 1e9:6.1f} billion, {of_a_draft / of_a_pass:.3f} of a pass"
)
print(f"  the head's {head / of_a_draft:6.0%}")
print(f"held in the file, without copies {held / 1e9:.1f} billion")
cost = of_a_draft / of_a_pass
for rate in (0.85, 0.90):
    print(
        f"one draft, accepted {rate:.0%}: {(1 + rate) / (1 + cost):.2f} times as fast"
    )
assert 36 < of_a_pass / 1e9 < 38 and 0.04 < cost < 0.05
assert 11 < held / 1e9 < 12 and 0.5 < head / of_a_draft < 0.6

# %%
# More than half of a draft is the head. The report gives 1.8 times the tokens per second at rates of 85 to 90 per cent.
# That fits the count, which leaves out all else.
#
# Bug museum
# ----------
#
# All mistakes below leave the text as it was, because the model judges every draft. We measure the loss of depth 1 on
# held-out text, first as it should be:


def depth_loss(model, mtp, h=None, known=None):
    h = model.model(rows) if h is None else h
    known = F.pad(rows[:, 1:], (0, 1)) if known is None else known
    logits = mtp.step(model, 1, h, known) @ model.head.weight.T
    return causal_lm_loss(logits, mtp_targets(rows, 1)).item()


def compare(wrong):
    print("right", *(f"{loss:.2f}" for loss in right), end="   ")
    print("wrong", *(f"{loss:.2f}" for loss in wrong))


right = [depth_loss(*pair) for pair in both]
print("loss of depth 1", *(f"{loss:.2f}" for loss in right))

# %%
# The embedding of the wrong token
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The layer is given each column's own token, which the state knows already, in place of the one that has just become
# known (M80). It must then guess two tokens at once.

wrong = [depth_loss(model, mtp, known=rows) for model, mtp in both]
compare(wrong)
assert all(b > a + 0.02 for a, b in zip(right, wrong))

# %%
# The state before the last norm
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# ``hnorm`` makes the length of any state the same, so the state before the model's last norm seems to do as well (M81).
# But that norm also has a weight for each feature, which ``hnorm`` does not undo.

with torch.no_grad():
    wrong = []
    for model, mtp in both:
        kept = []
        hook = model.model.norm.register_forward_pre_hook(
            lambda module, given, kept=kept: kept.append(given[0])
        )
        model.model(rows)
        hook.remove()
        wrong.append(depth_loss(model, mtp, h=kept[0]))
compare(wrong)
assert abs(statistics.mean(wrong) - statistics.mean(right)) < 0.3

# %%
# Here it makes hardly a difference: after so few steps the weights of that norm are still near 1. With the weights of a
# published model it would be another input than the one in training. No test of the text, and here not even the loss,
# shows the mistake; comparing states with ``transformers`` does. One program handed `the state before the part's own
# last norm <https://github.com/ikawrakow/ik_llama.cpp/pull/1815>`_ from draft to draft. In a model with experts
# more than one draft a pass then made the text slower; with a dense model of the same family nothing could be seen.
#
# State first, embedding second
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# DeepSeek-V3's report writes the state first (M82). Its weights, and most others, have the embedding first (readers of
# the code `asked why <https://github.com/sgl-project/sglang/issues/6423>`_); a few checkpoints do it the other way round,
# and both shapes are the same.

wrong = []
for model, mtp in both:
    swapped = MTP(model, 3).eval()
    swapped.load_state_dict(mtp.state_dict())
    W = mtp.layers[0].eh_proj.weight
    swapped.layers[0].eh_proj.weight.data = W.roll(64, dims=1)
    with torch.no_grad():
        wrong.append(depth_loss(model, swapped))
compare(wrong)
assert all(b > a + 0.02 for a, b in zip(right, wrong))

# %%
# A cache that keeps what was rejected
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The part has its own cache, and drafts leave columns in it that come from guesses (M83). These must go before the next
# draft, even if the guess was accepted, because they come from the part's own state instead of the model's.


class Keeps(GrowingCache):
    def crop(self, length):
        pass


wrong, whole = [], [tokens for _, tokens in results["one, three times"]]
with patch.object(mtp_drafter, "cache_for", lambda windows, **given: Keeps(1)):
    for model, mtp in both:
        wrong.append(by_place(model, first_depth(model, mtp))[1])
print("tokens a pass: cropped", *(f"{t:.2f}" for t in whole), end="   ")
print("kept", *(f"{t:.2f}" for t in wrong))
assert statistics.mean(wrong) < statistics.mean(whole) + 0.3

# %%
# With these models, which look at little but the latest bytes, not even the rate shows it. In a server, where one machine
# read the prompt and another went on, `such columns stayed <https://github.com/vllm-project/vllm/pull/55055>`_, and fewer
# drafts were accepted. To find it, compare every draft with what the layers say to the row without any cache. A loss
# that falls too far, the mistake of the lesson, is found by changing one token, as above.
#
# Exercises
# ---------
#
# 1. *Easy.* Count a draft of DeepSeek-V3 if its head had only the 32,768 likeliest tokens. A good answer gives the share
#    of a pass, and says why the text stays right.
# 2. *Medium.* Train with one depth instead of three. A good answer compares the rates at all three places when it is
#    used three times.
#
# Summary
# -------
#
# * Our layers equal those of ``transformers``; changing a token shows that no depth sees its answer.
# * At this size the extra loss changes the model's own loss little.
# * One depth can draft several tokens by going on from its own state.
# * A draft of DeepSeek-V3 multiplies less than 5 per cent of a pass; more than half of it is the head.
# * Mistakes in the part leave the text right. Most raise its loss, but some show in neither.
#
# Sources
# -------
#
# * Gloeckle et al.: `Better & Faster Large Language Models via Multi-token Prediction <https://arxiv.org/abs/2404.19737>`_, 2024. Several heads side by side, and what they do for a model.
# * DeepSeek-AI: `DeepSeek-V3 Technical Report <https://arxiv.org/abs/2412.19437>`_, 2024. The chain, its loss, rate and speed.
# * Li et al.: `EAGLE <https://arxiv.org/abs/2401.15077>`_, 2024. One layer that drafts from the model's states and then from its own.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
