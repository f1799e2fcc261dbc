"""What the widget ``train`` learns, and what such a run looks like.

The stories are those of :mod:`lm_from_scratch.text.plots`: they have few words and few kinds of
sentences, which a model of 28,000 numbers learns in some hundred steps.
"""

from functools import cache

import torch
import torch.nn.functional as F
from sphinx.locale import _

from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.text.plots import stories
from lm_from_scratch.text.story_grammar import LANGUAGES

PLOTS = 300
STEPS = (1, 30, 100, 200)


@cache
def texts() -> dict[str, str]:
    """The same plots in each language, a story a line."""
    documents = stories(PLOTS)
    return {
        language: "\n".join(one.text for one in documents if one.name.startswith(language))
        for language in LANGUAGES
    }


def config(vocab_size: int) -> GPT2Config:
    """The sizes of the widget (tests/site/test_live.py compares them)."""
    return GPT2Config(
        vocab_size=vocab_size, block_size=32, n_layer=2, n_head=4, n_embd=32,
        embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.08,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


@torch.enable_grad()
def losses(text: str, steps: int, lr: float = 0.01) -> list[float]:
    """The loss of each step, as in the widget but for the random numbers."""
    characters = sorted(set(text))
    stream = torch.tensor([characters.index(one) for one in text])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config(len(characters)))
        T = model.config.block_size
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
        found = []
        for step in range(1, steps + 1):
            starts = torch.randint(len(stream) - T, (8,))
            rows = torch.stack([stream[start : start + T + 1] for start in starts])
            optimizer.param_groups[0]["lr"] = lr * min(1, step / 20)
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
    return found


def picture(name: str, prompt: str) -> tuple[str, list[tuple[str, float, str]]]:
    """The loss after some steps, for readers who cannot train here."""
    run = losses(texts()["english"], STEPS[-1])
    shown = [run[step - 1] for step in STEPS]
    rows = [
        (_("step {number}").format(number=step), loss / max(shown), f"{loss:.2f}")
        for step, loss in zip(STEPS, shown, strict=True)
    ]
    return _("While a small GPT-2 learns to write stories, its loss falls:"), rows
