r"""
Multi-token prediction
======================

To predict one token, our Qwen2 turns the whole text into a state h of 128 numbers, then its head turns h into the next
token. The state is used once and thrown away. Yet it has seen the text. Can a small part go on from there, and draft the
tokens after the next?
"""

# sphinx_gallery_needs = ["../6_generation/2_speculative_decoding", "../2_qwen2/4_qwen2"]
# sphinx_gallery_words = ["MTP", "num_nextn_predict_layers", "nextn", "self-speculative decoding", "EAGLE", "Medusa", "DeepSeek-V3", "use_mtp", "predict several tokens at once", "predict further ahead", "two tokens at once", "several tokens ahead", "more than one token", "more than the next word", "look further ahead", "extra heads", "future tokens", "additional head", "draft without a second model"]
import torch

from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import since_qwen2_models as drawings
from lm_from_scratch.drawings.generation import drafts
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.mtp_drafter import MTPDrafter
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.generation.speculative import PromptLookup, speculate
from lm_from_scratch.models.mtp import MTP
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.text.targets import mtp_targets
from lm_from_scratch.training.loss import chunked_causal_lm_loss
from lm_from_scratch.training.mtp_loss import mtp_losses

qwen2, tokenizer = load_shipped("qwen2-docs")
qwen2.requires_grad_(False)
start = "If the file does not exist, an"
plain = complete(generate(qwen2, [tokenizer.start(start)], 40, GREEDY))[0]

drawings.self_draft(start, tokenizer.pieces(plain[:3]))

# %%
# The first row is a full pass through eight blocks. Each further row joins the state with the embedding of the latest
# token, runs *one* block, and uses the same head again. So a draft costs one block. (The drawing shows the words that
# Qwen2 writes, so all drafts are right.)
#
# We train such a part on top of the finished Qwen2, whose weights stay as they are, from two seeds:

documents, _ = split(load_corpus("reference"))
ids = torch.tensor([i for d in documents for i in tokenizer.start(d.text)])
rows = ids[: 192 * 64].view(192, 64)
with torch.no_grad():
    states = qwen2.model(rows)  # (192, T, C): what the frozen model knows


def taught(loss_of, steps, seed):
    torch.manual_seed(seed)
    mtp = MTP(qwen2)
    optimizer = torch.optim.AdamW(mtp.parameters(), lr=5e-3, fused=True)
    for step in range(steps):
        some = torch.randint(len(rows), (3,))
        loss = loss_of(qwen2, mtp, states[some], rows[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / steps)
    return mtp, loss_of(qwen2, mtp, states[:16], rows[:16]).item()


parts = [taught(lambda *x: mtp_losses(*x)[0], 120, s) for s in range(2)]
mtp = parts[0][0]

# %%
# Now the first part guesses two tokens before each pass of Qwen2. Blue guesses were right, and a bar ends a pass:

prompt, drafter = [tokenizer.start(start)], MTPDrafter(mtp)
passes = list(speculate(qwen2, drafter, prompt, 40, GREEDY, 2))
shown = [tokenizer.pieces(p.tokens[0]) for p in passes]

assert [token for p in passes for token in p.tokens[0]] == plain
assert 24 < len(passes) < 38
drafted = [([*row[:-1]], len(row) - 1, row[-1]) for row in shown]
drafts(drafted, start)

# %%
# That is 40 tokens in about 30 passes, and every token is the one that Qwen2 would have written alone: the rule of
# `speculative decoding <../6_generation/2_speculative_decoding.ipynb>`_ judges the guesses. But here there is no second
# model. The drafter builds on what the first model has already computed.
#
# One block more
# --------------
#
# In code, one row of the first drawing is this:

layer = mtp.layers[0]


def guess(h, known):  # states (T, C), and the token after each
    x = qwen2.model.embed_tokens(known)
    u = layer.eh_proj(
        torch.cat([layer.enorm(x), layer.hnorm(h)], dim=-1)
    )  # (T, C)
    places = torch.arange(len(known))[None]
    rotation = qwen2.model.rotary_emb(places, u.dtype)
    seen = NO_CACHE.see(u[None], None, None, [None])[0]
    y = layer.mtp_block(u[None], rotation, seen, NO_CACHE)[0]
    return layer.post_norm(y) @ qwen2.head.weight.T  # (T, V)


with torch.no_grad():
    idx = torch.tensor(tokenizer.start(start) + plain[:1])
    h = qwen2.model(idx[None, :-1])[0]
    logits = guess(h, idx[1:])
    want = mtp(qwen2, qwen2.model(idx[None]), idx[None])[0][0, :-1]

torch.testing.assert_close(logits, want @ qwen2.head.weight.T)
assert h.shape == (len(idx) - 1, 128)
print("states", tuple(h.shape), "  logits", tuple(logits.shape))

# %%
# **Predict first.** Qwen2 has 2.1 million weights. How many are new in the part that drafts?
#
# * Nearly none: it shares everything.
# * About a tenth as many.
# * Half as many: it needs a head of its own.


whole, new = (sum(p.numel() for p in m.parameters()) for m in (qwen2, mtp))
head = qwen2.head.weight.numel()
print(f"Qwen2 {whole:,}, of which its head {head:,}; new {new:,}")

assert 0.08 < new / whole < 0.14 and 2.0e6 < whole < 2.2e6

# %%
# About a tenth: one block of eight, and a projection. The embedding and the head are Qwen2's own.
#
# Which token to learn
# --------------------
#
# In the usual loss, depth 0, each column sees the text up to its own token, and its target is the next one. Depth 1 is
# given that next token. So its target is one token further on, and it runs out of targets one column earlier:

words = tokenizer.pieces(tokenizer.encode("If the file does not"))
drawings.mtp_targets(words, (0, 1))

# %%
# It is easy to shift one place too few. So we train two more parts, with the targets of depth 0.
#
# **Predict first.** What happens to their loss?
#
# * It stays high: the task is wrong.
# * It ends about as high as before.
# * It falls far lower.


def shifted_too_little(model, mtp, h, idx):
    (u,) = mtp(model, h, idx)
    return chunked_causal_lm_loss(u, model.head.weight, mtp_targets(idx, 0))


wrong_parts = [taught(shifted_too_little, 30, seed) for seed in range(2)]
text = torch.tensor([tokenizer.start(start) + plain])


@torch.no_grad()
def hits(part):  # of the last 39 tokens that Qwen2 wrote
    (u,) = part(qwen2, qwen2.model(text), text)
    guessed = (u @ qwen2.head.weight.T).argmax(dim=-1)
    return (guessed[:, :-2] == text[:, 2:])[0, -39:].sum().item()


kinds = {"right": parts, "wrong": wrong_parts}
guesses = {name: [hits(m) for m, _ in ps] for name, ps in kinds.items()}
for name, pair in kinds.items():
    print(f"{name} targets: loss", *(f"{loss:.1f}" for _, loss in pair), end="")
    print(", right guesses of 39:", *guesses[name])

assert sum(x for _, x in wrong_parts) < 0.75 * sum(x for _, x in parts)
assert max(guesses["wrong"]) < min(guesses["right"])

# %%
# It falls far lower, from every seed and in fewer steps, because the answer is among the inputs: the part learns to repeat
# the token that it was given.
#
# As a drafter it is worthless, except where the text does repeat a token. A loss that looks too good is the only warning.
#
# Is it a good drafter?
# ---------------------
#
# We compare it with two drafters that cost nothing. *Look-up* copies what followed the last time. A *bigram* table says
# which token most often followed the latest token in the training text.

counts = torch.zeros(4096, 4096)
one = torch.ones(len(ids) - 1)
counts.index_put_((ids[:-1], ids[1:]), one, accumulate=True)
after = counts.argmax(1).tolist()


class Bigram:
    def start(self, model, sampler, longest, n_draft):
        return self.propose

    def propose(self, rows, wanted, generators):
        drafts = []
        for row, n in zip(rows, wanted):
            text = [row[-1]]
            for _ in range(n):
                text.append(after[text[-1]])
            drafts.append(text[1:])
        return drafts, None


# %%
# **Predict first.** Each drafter guesses two tokens before each pass, for four texts of 40 tokens. Which one saves the
# most passes?
#
# * Look-up: greedy text of a small model repeats itself.
# * The bigram table: it has read the whole training text.
# * The new part: it knows the state.

texts = [start, "Return the number of items in", "Read the", "A class"]
drafters = {
    "look-up": PromptLookup(),
    "bigram": Bigram(),
} | {f"new part {n}": MTPDrafter(part) for n, (part, _) in enumerate(parts)}
prompts = [tokenizer.start(text) for text in texts]
counted = {}
for name, drafter in drafters.items():  # it writes all four at once
    said = [p.tokens for p in speculate(qwen2, drafter, prompts, 40, GREEDY, 2)]
    counted[name] = [sum(map(bool, row)) for row in zip(*said)]
dots = generate(qwen2, [tokenizer.start(texts[1])], 12, GREEDY)
print(tokenizer.decode(complete(dots)[0]))
print("passes for 40 tokens    mean  without the second")
for name, row in {"alone": [40] * 4, **counted}.items():
    print(
        f"{name:10}",
        *(f"{n:3}" for n in row),
        f"{sum(row) / 4:8.1f} {(sum(row) - row[1]) / 3:8.1f}",
    )

for row in [counted[f"new part {seed}"] for seed in range(2)]:
    assert sum(counted["bigram"]) < sum(row)
    assert row[1] > 33 > 22 > max(counted["bigram"][1], counted["look-up"][1])
assert (
    sum(sum(row) - row[1] for name, row in counted.items() if "new" in name) / 2
    < sum(counted["bigram"]) - counted["bigram"][1] - 2
)

# %%
# The bigram table, but only because of one text: after the second beginning, Qwen2 writes *the range 0* and then nothing
# but dots. Look-up copies the dots and the table predicts them, but the new part guesses hardly any of them.
#
# On the other three texts (last column) the new part saves the most passes, on average over its seeds. A table of pairs
# cannot become much better; the part has hardly begun to learn (exercise 3).
#
# What it costs
# -------------
#
# A pass saved is not yet time saved, because drafting is work too. Count the weights that are read: a pass reads all of
# Qwen2, a draft reads the new part and the head.

c = (new + head) / whole
best = min(sum(counted[f"new part {seed}"]) / 4 for seed in range(2))
tokens = 39 / (best - 1)
print(f"a draft costs {c:.2f} of a pass")
print(f"{tokens:.2f} tokens a pass, for the weights of {1 + 2 * c:.2f} passes")
print(f"speed-up {tokens / (1 + 2 * c):.2f}")

assert 0.3 < c < 0.4 and tokens / (1 + 2 * c) < 1

# %%
# So here drafting does *not* pay off, not even from the best seed: it reads more weights than decoding without drafts. Our
# head is a quarter of the whole model, and every draft reads it. The bigram table reads no weights, so each pass that it
# saves is a gain.
#
# In DeepSeek-V3 a token meets about 36.5 billion weights in a pass, and 1.6 billion in a draft. Its report says that 85
# to 90 per cent of the second tokens were accepted, and that decoding made 1.8 times as many tokens per second. With one
# draft per pass:

c = 1.6 / 36.5
print(f"{(1 + 0.85) / (1 + c):.2f} to {(1 + 0.90) / (1 + c):.2f} times")

assert 1.75 < 1.85 / (1 + c) < 1.9 / (1 + c) < 1.85

# %%
# The count fits the report.
#
# DeepSeek also trained the part together with the model, from the start. Many checkpoints of 2025 and 2026 carry such
# parts; a loader that only writes text leaves them in the file. `Multi-token prediction in depth
# <8a_multi_token_prediction_in_depth.ipynb>`_ asks whether the extra loss helps the model itself, and shows what goes
# wrong.
#
# Exercises
# ---------
#
# 1. *Easy.* Draft one token and four tokens per pass instead of two. A good answer says which needs the fewest passes,
#    which reads the fewest weights, and why they are not the same.
# 2. *Medium.* Let the part learn from what Qwen2 itself predicts, instead of from the training text: the target is then
#    the distribution of depth 0 in the next column. A good answer compares the passes for the four texts.
# 3. *Hard.* Train for 50, 200 and 800 steps. A good answer compares the mean passes with those of the bigram table, for
#    three seeds, and says whether the differences are larger than those between seeds.
#
# Summary
# -------
#
# * Join the state with the next token, and send both through one block and the model's own head: that guesses the token
#   after the next.
# * The target is shifted by two. If it is shifted by one, the part sees the answer: its loss is low, and hardly a draft is
#   right.
# * The text stays the model's own. Whether it comes faster depends on what a draft costs compared with a pass.
