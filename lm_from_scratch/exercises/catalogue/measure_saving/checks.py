"""What a cache saves, in multiplications: the model is built, run both ways, and counted."""

from functools import lru_cache

import torch
from torch import Generator
from torch.utils.flop_counter import FlopCounterMode

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer
from lm_from_scratch.models.qwen2 import Attention, Qwen2Config, Qwen2ForCausalLM


@torch.no_grad()
@lru_cache
def multiplications(prompt: int, new: int, **sizes: int) -> tuple[int, int]:
    """Counted by torch, in every product of the package's model; it counts additions too."""
    config = Qwen2Config(
        vocab_size=sizes["vocab"],
        n_layer=sizes["layers"],
        n_embd=sizes["width"],
        n_head=sizes["heads"],
        n_kv_head=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        intermediate_size=sizes["mlp"],
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = formula_attention  # whose two products are seen as such
    results = []
    for cached in (False, True):
        cache = GrowingCache(config.n_layer)
        ids = torch.zeros(1, prompt + new, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            for end in range(prompt, prompt + new):
                if not cached:
                    cache = GrowingCache(config.n_layer)
                model(ids[:, cache.length : end], cache=cache, keep=slice(-1, None))
        results.append(counter.get_total_flops() // 2)
    return results[0], results[1]


def model(g: Generator, **fixed: int) -> dict[str, int]:
    groups = integer(g, 2, 4)
    kv_heads = integer(g, 2, 4)
    sizes = dict(
        layers=integer(g, 3, 5),
        width=integer(g, 9, 20),
        heads=groups * kv_heads,
        kv_heads=kv_heads,
        head_dim=2 * integer(g, 2, 6),
        mlp=integer(g, 21, 40),
        vocab=integer(g, 50, 90),
    )
    return sizes | fixed


def one_token(g: Generator) -> Call:
    """The first token: both are the same pass over the prompt."""
    sizes = model(g, layers=1)
    return call(integer(g, 3, 9), 1, **sizes | {"kv_heads": sizes["heads"]})


def short(g: Generator) -> Call:
    """A prompt of one token: its pass looks like any other."""
    return call(1, 3, **model(g, vocab=300))


# ------------------------------------------------------------------------------- wrong answers

PAIRS = "2 * heads * head_dim * T * S"
PASS = "layers * (T * weights + pairs) + width * vocab"
QUICK = "one_pass(1 if end > prompt else end, end)"
ONE, GROUPED = "one token, one layer", "fewer heads of keys, several layers"
SEVERAL, SHORT = "several tokens", "a prompt of one token, a large vocabulary"
LONG, NONE = "a long prompt, a narrow model", "no token"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("as many heads of keys as of queries",
     {"2 * width * kv_heads * head_dim": "2 * width * heads * head_dim"}, GROUPED),
    ("keys are made, values are not",
     {"2 * width * kv_heads * head_dim": "width * kv_heads * head_dim"}, ONE),
    ("the output matrix is left out",
     {"2 * width * heads * head_dim": "width * heads * head_dim"}, ONE),
    ("the heads together are as wide as the model",
     {"2 * width * heads * head_dim": "2 * width * width"}, ONE),
    ("two matrices in the MLP, as in GPT-2", {"3 * width * mlp": "2 * width * mlp"}, ONE),
    ("the MLP is left out", {" + 3 * width * mlp": ""}, ONE),
    ("the scores are counted, the mean of the values is not",
     {PAIRS: "heads * head_dim * T * S"}, ONE),
    ("hidden pairs are left out: half of the square",
     {PAIRS: "2 * heads * head_dim * T * (T + 1) // 2 if T == S else " + PAIRS}, ONE),
    ("attention costs nothing", {PAIRS: "0"}, ONE),
    ("attention in the heads of keys alone", {PAIRS: "2 * kv_heads * head_dim * T * S"}, GROUPED),
    ("the head for every token of the pass", {"+ width * vocab": "+ T * width * vocab"}, ONE),
    ("the head is left out", {" + width * vocab": ""}, ONE),
    ("the head in every layer", {PASS: "layers * (T * weights + pairs + width * vocab)"}, GROUPED),
    ("one layer", {"layers * (T": "1 * (T"}, GROUPED),
    ("multiplications and additions", {PASS: f"2 * ({PASS})"}, ONE),
    ("with a cache a token sees itself alone",
     {QUICK: "one_pass(*[1 if end > prompt else end] * 2)"}, SEVERAL),
    ("with a cache the prompt is never read", {QUICK: "one_pass(1, end)"}, ONE),
    ("the last token is read, too",
     {"range(prompt, prompt + new)": "range(prompt, prompt + new + 1)"}, ONE),
    ("the first new token comes without a pass",
     {"range(prompt, prompt + new)": "range(prompt + 1, prompt + new)"}, ONE),
    ("without a cache the prompt is read again, but not what was written",
     {"one_pass(end, end) for end": "one_pass(prompt, prompt) for end"}, SEVERAL),
    ("the number of keys is that of the prompt, also later",
     {QUICK: "one_pass(1 if end > prompt else end, prompt)"}, SEVERAL),
    ("both numbers are exchanged", {"return without, cached": "return cached, without"}, SEVERAL),
    ("the prompt is read even if nothing is written",
     {"lengths = range(prompt, prompt + new)": "lengths = range(prompt, prompt + max(new, 1))"},
     NONE),
]  # fmt: skip

CASES = (
    Case(ONE, one_token,
         "the first token comes from one pass over the prompt, with a cache or without", points=2,
         teaching="one pass, before any cache"),
    Case(GROUPED, lambda g: call(integer(g, 3, 9), 1, **model(g)),
         "keys and values have heads of their own; every layer has all parts",
         teaching="heads and layers, in one pass"),
    Case(SEVERAL, lambda g: call(integer(g, 3, 9), integer(g, 3, 6), **model(g)),
         "pass by pass: how many tokens are read, and how many keys do they see?", points=3,
         teaching="the question itself, at sizes like those of the lesson"),
    Case(SHORT, short, "a prompt of one token is read once, and the head is used once in a pass",
         teaching="numbers small enough to follow by hand"),
    Case(LONG,
         lambda g: call(integer(g, 90, 120), 2, **model(g, width=2, mlp=3, layers=1, vocab=5)),
         "the longer the text, the more of the work is in pairs of tokens",
         teaching="where attention costs more than the matrices"),
    Case(NONE, lambda g: call(integer(g, 3, 9), 0, **model(g)),
         "nothing is written, so nothing is read"),
)  # fmt: skip

EXERCISE = Exercise(
    name="measure_saving", function="multiplications", page="5_caching/1_why_cache", minutes=20,
    difficulty=2,
    outcome="Predict how much work a cache saves, for any model, and see the prediction counted.",
    after=("growing_cache",), reference=multiplications, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write one function for a pass: T tokens that see S keys. Which of its parts depend on S?",
        "Both ways of writing are a sum of such passes. Note T and S of the first three passes, "
        "with a cache and without.",
        "With a cache only the first pass has more than one token; the number of keys grows in "
        "both. The token that is written last is in no pass.",
    ),
)  # fmt: skip
