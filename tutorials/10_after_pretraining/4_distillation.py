r"""
Learning from a larger model
============================

A story has begun, and one token comes next. The text says which one it was. A model that has read thousands of such
stories can say more: how probable *each* token was. Here is a place in a story at which our model ``worlds`` is not sure:
"""

# sphinx_gallery_needs = ["../1_gpt2/4_training"]
# sphinx_gallery_words = ["knowledge distillation", "teacher student", "soft targets", "soft labels", "dark knowledge", "KL divergence", "model compression", "logit distillation", "teach a small model from a big one", "small model learns from a large one", "temperature in training", "compress a model into a smaller one", "same quality smaller model", "DistilGPT2", "DistilBERT", "student model", "learn from GPT-4", "outputs of a large model", "synthetic data", "imitate a model", "logits of the teacher", "copy a model", "shrink a model by training", "train a small model from a large model", "small model from a big model", "train with a large model", "smaller but as good", "smaller and as clever"]

from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.generation.text import generate_text
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM
from lm_from_scratch.text.corpora import split
from lm_from_scratch.text.plots import stories as corpus
from lm_from_scratch.training.distillation import distillation_loss
from lm_from_scratch.training.loss import causal_lm_loss

teacher, tokenizer = load_shipped("worlds")
learn, held_out = split(corpus(1500))


def rows(documents, n):  # the first 65 tokens of n stories
    ids = ([0, *tokenizer.encode(d.text)][:65] for d in documents)
    return torch.tensor([row for row in ids if len(row) == 65][:n])


stories, test = rows(learn, 120), rows(held_out, 48)
with torch.no_grad():
    p = teacher(stories[:1, :-1])[0].softmax(-1)  # (T, V)
t = int((p * p).sum(-1)[16:].argmin()) + 16  # where it is least sure
came = int(stories[0, t + 1])
likely = p[t].topk(8).indices.tolist()
likely += [] if came in likely else [came]
print("...", repr(tokenizer.decode(stories[0, t - 12 : t + 1].tolist())), "...")

fig, (ax,) = figure(4.6, 2.8)
names = [repr(tokenizer.decode([i])) for i in likely]
ax.barh(names, [float(p[t, i]) for i in likely], color=COLOURS[0])
ax.barh(names, [float(i == came) for i in likely], color=COLOURS[1], alpha=0.3)
ax.invert_yaxis()
ax.set(title="What the text says, and what the teacher says", xlim=(0, 1))
plt.show()

# %%
# The pale bar is the *label*, the token that came: it has everything. The other bars are the probabilities by the
# model, which we call the *teacher*. Several tokens were possible, and the text shows one of them. If a model learns
# from labels, it must see many stories to find the others. If it learns from the teacher, it sees them all at once.
# That is *distillation*.
#
# A teacher and a student
# -----------------------
#
# The teacher is ``worlds``. The *student* is a model of about a ninth of its size, with random weights.


def student(seed):
    torch.manual_seed(seed)
    sizes = dict(n_layer=2, n_head=2, n_kv_head=2, n_embd=64)
    config = replace(teacher.config, **sizes, intermediate_size=128)
    return Qwen2ForCausalLM(config)


sizes = [sum(w.numel() for w in m.parameters()) for m in (teacher, student(0))]
print(f"teacher {sizes[0]:,} weights, student {sizes[1]:,}")
assert 7 < sizes[0] / sizes[1] < 10

# %%
# With labels, the loss is :math:`-\log q_y`: it looks only at the probability :math:`q_y` that the student gives to the
# token :math:`y` that came. With a teacher, the loss compares its probability :math:`p_v` of every token v with the
# student's, :math:`q_v`. It is the *Kullback-Leibler divergence*, KL for short:
#
# .. math::
#
#    \mathrm{KL}(p, q) = \sum_{v} p_v \log \frac{p_v}{q_v}
#
# It is never negative, and it is 0 only when the student says exactly what the teacher says. In code:


def kl(student_logits, teacher_logits):  # (..., V) each
    log_p = teacher_logits.log_softmax(-1)
    log_q = student_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)  # (...)


x, y = stories[:, :-1], stories[:, 1:]
with torch.no_grad():
    soft = torch.cat([teacher(some) for some in x.split(20)])  # (N, T, V)
    new = student(0)(x[:4])
mine, package = (
    kl(new, soft[:4]).mean(),
    distillation_loss(new, soft[:4], y[:4]),
)
print(f"at the start: {mine:.4f} nats a token")
torch.testing.assert_close(mine, package)
one_hot = F.one_hot(y[:4], tokenizer.vocab_size).float().clamp(min=1e-30).log()
torch.testing.assert_close(kl(new, one_hot).mean(), causal_lm_loss(new, y[:4]))

# %%
# (A *nat* is the unit of a loss with natural logarithms.) The code also checks something worth knowing: a label is a
# teacher who is certain. With all probability on one token, the divergence is the usual loss.
#
# Thirty stories
# --------------
#
# In the training below, ``share`` is the part of the loss that comes from the teacher: 0 is labels only, 1 is the
# teacher only. What counts in the end is the usual loss, on new stories.


@torch.no_grad()
def held_out_loss(model):
    return causal_lm_loss(model(test[:, :-1]), test[:, 1:]).item()


def train(seed, n, share, steps=80):
    model = student(seed)
    adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    losses = []
    for step in range(steps):
        rate = 8e-3 * min(1, (step + 1) / 10) * (1 - step / steps)
        adamw.param_groups[0]["lr"] = rate
        i = torch.randint(n, (8,))
        loss = distillation_loss(model(x[i]), soft[i], y[i], share=share)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        if step % 16 == 15:
            losses.append(held_out_loss(model))
    return model, losses


# %%
# **Predict first.** A student reads the same 30 stories again and again, in 80 steps of 8 stories. One student learns
# from the labels, another from the teacher. Which one is better on new stories?
#
# * the one with labels: they are the truth, and the teacher makes mistakes
# * the one with the teacher
# * no difference: they have read the same 30 stories

ways = {"labels": (30, 0.0), "teacher": (30, 1.0)}
runs = {
    name: [train(seed, *way) for seed in range(2)] for name, way in ways.items()
}
for name, both in runs.items():
    print(f"{name:8}", *(f"{losses[-1]:.3f}" for _, losses in both))
final = {name: [l[-1] for _, l in both] for name, both in runs.items()}
assert all(b < a - 0.1 for a, b in zip(final["labels"], final["teacher"]))

# %%
# The one with the teacher, for both seeds. The teacher was asked about the same 30 stories and no others. What
# it adds is what it learned from thousands of stories before.
#
# How much is that worth? Let us give the student with labels more stories: all 120, in as many steps.

runs["120 stories"] = [train(seed, 120, 0.0) for seed in range(2)]

fig, (ax,) = figure(4.6, 2.8)
steps = range(16, 81, 16)
for (name, both), mark in zip(runs.items(), "o^s", strict=True):
    mean = torch.tensor([losses for _, losses in both]).mean(0)
    ax.plot(steps, mean, marker=mark, label=name)
ax.axhline(
    held_out_loss(teacher), color="0.5", ls=":", label="the teacher itself"
)
ax.set(title="Held-out loss, mean of two seeds", xlabel="step", ylabel="nats")
ax.legend(frameon=False)
plt.show()
more = [l[-1] for _, l in runs["120 stories"]]
print("120 stories", *(f"{loss:.3f}" for loss in more))
assert abs(sum(more) - sum(final["teacher"])) / 2 < 0.15
assert sum(more) / 2 < sum(final["labels"]) / 2 - 0.2
assert held_out_loss(teacher) < min(final["teacher"]) - 0.3

# %%
# Four times as many stories, in as many steps, help about as much as the teacher's opinion of a few. So distillation
# pays where *data* is short.
#
# All students stay far from the teacher: they have a ninth of its weights, and take few steps. This is how two of them
# write, one that learned in each way:

for name in ("labels", "teacher"):
    model = runs[name][0][0]
    text = "".join(generate_text(model, tokenizer, "", 40, seed=1))
    print(f"{name:8}", " ".join(text.split()))

# %%
# After thirty stories a student has caught their tone. From a teacher it also learns the teacher's mistakes: it is taught
# whatever the teacher finds probable, right or wrong.
#
# Exercises
# ---------
#
# 1. *Easy.* Give ``distillation_loss`` a ``share`` of 0.5: half labels, half teacher. A good answer has the held-out
#    loss of three seeds, and says whether the labels add anything.
# 2. *Medium.* The inventors of distillation divide the logits of both models by a ``temperature`` of 2 or more, so that
#    small probabilities count as well. But they trained classifiers, whose teachers are nearly certain. Does it help
#    here? A good answer has three seeds, and an explanation that looks at the first picture.
# 3. *Hard.* Let the teacher write new stories, and train the student on their labels alone. How many must the teacher
#    write until the student is as good as with the teacher's probabilities for 30?
#
# Summary
# -------
#
# * A label says which token came; a teacher says how probable every token was. Distillation imitates the distribution.
# * Its loss is the divergence of two distributions. With a teacher who is certain, it is the usual loss.
# * It helps where data is scarce. More data can help as much.
