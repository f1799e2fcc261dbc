"""logit_processors.py and the newer cuts of sampling.py, against those of transformers."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, token_ids
from transformers import (
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TypicalLogitsWarper,
)

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.logit_processors import (
    add_bias,
    forbid,
    min_length,
    no_repeat_ngram,
)
from lm_from_scratch.generation.sampling import GREEDY, Sampler, keep_min_p, keep_typical

MODEL = tiny_gpt2()
V = 97


def logits_of(seed: int, B: int = 3) -> torch.Tensor:
    return 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 10**6), st.floats(0.01, 1.0), st.floats(0.01, 0.99))
def test_min_p_and_typical_equal_transformers(seed: int, min_p: float, typical: float) -> None:
    logits = logits_of(seed)
    idx = torch.zeros(3, 1, dtype=torch.long)
    torch.testing.assert_close(keep_min_p(logits, min_p), MinPLogitsWarper(min_p)(idx, logits))
    torch.testing.assert_close(
        keep_typical(logits, typical), TypicalLogitsWarper(typical)(idx, logits)
    )


def test_the_cuts_are_on_only_where_they_are_asked_for_and_in_order() -> None:
    logits, seen = logits_of(1), torch.zeros(3, V, dtype=torch.bool)
    assert torch.equal(Sampler(min_p=0.0, typical_p=1.0).logits(logits, seen), logits)
    got = Sampler(temperature=2.0, top_k=20, min_p=0.2, typical_p=0.7).logits(logits, seen)
    cut = Sampler(top_k=20).logits(logits / 2, seen)
    want = keep_typical(keep_min_p(cut, 0.2), 0.7)
    assert torch.equal(got, want)
    kept = lambda x: x.isfinite().sum(1).tolist()  # noqa: E731
    assert kept(got) < kept(cut) and min(kept(got)) >= 1
    given = dict(temperature=2.0, top_k=20, min_p=0.25, typical_p=0.75)
    as_numpy = {name: np.array(x, np.float32)[()] for name, x in given.items() if name != "top_k"}
    numpys = Sampler(**as_numpy, top_k=np.int64(20))
    assert torch.equal(numpys.logits(logits, seen), Sampler(**given).logits(logits, seen))
    for bad, message in (
        (dict(min_p=1.1), "min_p=1.1 must be in 0"),
        (dict(min_p=-0.1), "min_p=-0.1"),
        (dict(typical_p=0.0), "typical_p=0.0 must be above 0"),
        (dict(typical_p=math.nan), "typical_p=nan must be a finite number"),
        (dict(temperature=True), "temperature=True must be a finite number"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampler(**bad)


@given(st.lists(st.integers(0, 2), max_size=12), st.integers(1, 4))
def test_no_repeat_ngram_equals_transformers(row: list[int], n: int) -> None:
    rows = [row, row[::-1]] if row else [[0], [1]]
    logits = logits_of(0, 2)
    want = NoRepeatNGramLogitsProcessor(n)(torch.tensor(rows), logits.clone())
    got = no_repeat_ngram(n)(logits, rows)
    assert torch.equal(got, want)
    assert torch.equal(logits, logits_of(0, 2))  # the input is left as it was


def test_bias_and_shortest_length_equal_transformers() -> None:
    logits, rows = logits_of(4), [[5] * 4] * 3
    bias = {3: 2.5, 90: -math.inf}
    want = SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()])
    idx = torch.tensor(rows)
    torch.testing.assert_close(add_bias(bias)(logits, rows), want(idx, logits))
    for n in (4, 5):
        want = MinLengthLogitsProcessor(n, [7, 8], device="cpu")(idx, logits)
        assert torch.equal(min_length(n, [7, 8])(logits, rows), want)
    assert forbid([7])(logits, rows)[:, 7].isinf().all()
    mixed = min_length(3, [7])(logits, [[1], [1, 2], [1, 2, 3]])[:, 7]
    assert mixed.isinf().tolist() == [True, True, False]


def test_processors_compose_and_see_prompt_and_text_of_their_own_row() -> None:
    prompts = [[5, 6, 5, 6, 5], [11], [5, 6, 7]]
    together = complete(generate(MODEL, prompts, 30, GREEDY, processors=[no_repeat_ngram(2)]))
    for prompt, said in zip(prompts, together, strict=True):
        alone = complete(generate(MODEL, [prompt], 30, GREEDY, processors=[no_repeat_ngram(2)]))
        assert alone == [said]
        row = [prompt[-1], *said]
        new = list(itertools.pairwise(row))
        old = list(itertools.pairwise(prompt))
        assert len(set(new)) == len(new) and not set(new) & set(old)
    plain = complete(generate(MODEL, prompts, 30, GREEDY))
    assert plain != together
    never = forbid([plain[0][0]])
    first = complete(generate(MODEL, prompts, 1, GREEDY, processors=[never]))
    boosted = complete(generate(MODEL, prompts, 1, GREEDY, processors=[never, add_bias({9: 1e6})]))
    assert first[0] != plain[0][:1] and boosted == [[9]] * 3


def test_bad_rules_are_refused() -> None:
    rows = token_ids(3, 2).tolist()
    for bad, message in (
        (lambda: no_repeat_ngram(0), "n=0"),
        (lambda: forbid([-1]), "token id -1"),
        (lambda: forbid([97])(logits_of(0), rows), "token id 97 is not below vocab_size=97"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
    with pytest.raises(ValueError, match="no token can be chosen"):
        complete(generate(MODEL, rows, 1, GREEDY, processors=[forbid(range(97))]))
