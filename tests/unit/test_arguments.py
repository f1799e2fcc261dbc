"""What a learner may hand over by a slip is refused in a sentence of the package, in Python too."""

import math
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_gpt2, tiny_qwen2
from torch import Tensor

import lm_from_scratch
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.generation.beam_search import beam_search
from lm_from_scratch.generation.engine import Engine
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.logit_processors import LogitProcessor, forbid, min_length
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.muon import Muon
from lm_from_scratch.text.tokenizer import Tokenizer

MODELS = {"gpt2": tiny_gpt2(), "qwen2": tiny_qwen2()}
MODEL = MODELS["gpt2"]
V, LAYERS = MODEL.config.vocab_size, MODEL.config.n_layer
IDX = torch.tensor([[1, 2, 3], [4, 5, 6]])
POOL = BlockPool(LAYERS, *MODEL.config.kv_shape[:2], 8, 4)
PACKAGE = str(Path(lm_from_scratch.__file__).parent)


def says(words: str, call: Callable[[], Any]) -> None:
    """The call is refused with these words, which the package itself says."""
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        call()
    assert traceback.extract_tb(error.tb)[-1].filename.startswith(PACKAGE)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    ("idx", "words"),
    [
        ([[1, 2]], "idx is a list; it must be a tensor"),
        ("The", "idx is a str"),
        (torch.tensor([1, 2]), "idx has shape (2,)"),
        (torch.tensor([[True]]), "idx has dtype torch.bool; token ids are torch.int64"),
        (torch.tensor([[1]], dtype=torch.uint8), "idx has dtype torch.uint8"),
        (torch.tensor([[1, -1]]), f"idx holds -1 ... 1; the tokens of the model are 0 ... {V - 1}"),
        (torch.tensor([[1, V]]), f"idx holds 1 ... {V}; the tokens of the model"),
    ],
)
def test_what_are_no_token_ids(model, idx: Any, words: str) -> None:
    says(words, lambda: model(idx))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache": 5}, "the cache is a int, not one as GrowingCache"),
        ({"cache": None}, "the cache is a NoneType"),
        ({"positions": [[0, 1, 2]] * 2}, "positions are a list; they must be a tensor"),
        ({"positions": torch.ones(2, 3)}, "positions have dtype torch.float32"),
        ({"positions": torch.arange(3), "documents": 1}, "positions have shape (3,)"),
        ({"positions": torch.arange(3).expand(2, 3), "documents": [1]}, "documents are a list"),
        ({"keep": 1.5}, "keep=1.5 must be a slice, or a tensor of indices"),
        ({"keep": -1}, "keep=-1 must be a slice"),
        ({"keep": None}, "keep=None must be a slice"),
        ({"keep": torch.tensor([1.5])}, "keep=tensor([1.5000]) must be a slice"),
    ],
)
def test_what_is_no_cache_and_what_are_no_positions(model, options: Any, words: str) -> None:
    says(words, lambda: model(IDX, **options))


@pytest.mark.parametrize("kind", [GrowingCache, lambda n: PagedCache(POOL)])
def test_a_layer_that_there_is_not_has_no_contents(kind) -> None:
    cache = kind(LAYERS)
    for layer in (LAYERS, -1, 0.0, None, "0"):
        says(f"layer={layer!r} is not in 0 ... {LAYERS - 1}", lambda n=layer: cache.contents(n))
    says("layer 0 of the cache is empty", lambda: cache.contents(0))
    with torch.no_grad():
        MODEL(IDX, cache=cache)
    assert cache.contents(0)[2].tolist() == [[0, 1, 2]] * 2
    cache.reset()


def test_what_is_no_number_of_layers_and_no_pool_and_no_request() -> None:
    for number in (0, "2", [1, 2], None):
        says("n_layer=", lambda n=number: GrowingCache(n))
    says("pool=5 must be a BlockPool", lambda: Engine(MODEL, 5))
    says("request=[1, 2] must be a Request", lambda: Engine(MODEL, POOL).submit([1, 2]))


#: What a processor may make of logits (1, V) by a slip.
SLIPS: dict[str, Callable[[Tensor], Any]] = {
    "a processor gave None": lambda logits: None,
    "a processor gave [[": lambda logits: logits.tolist(),
    f"a processor gave ({V},) in torch.float32": lambda logits: logits[0],
    f"a processor gave (1, {2 * V})": lambda logits: torch.cat([logits, logits], dim=1),
    "a processor gave (1, 3)": lambda logits: logits[:, :3],
    f"a processor gave (1, {V}) in torch.bool": lambda logits: logits > 0,
}


@pytest.mark.parametrize("words", SLIPS)
@pytest.mark.parametrize("way", ["greedy", "sampled", "beams"])
def test_a_processor_that_gives_no_logits(way: str, words: str) -> None:
    processors: list[LogitProcessor] = [lambda logits, rows: SLIPS[words](logits)]
    if way == "beams":
        says(words, lambda: beam_search(MODEL, [[1]], 2, 1, processors=processors))
    else:
        sampler = GREEDY if way == "greedy" else Sampler()
        says(words, lambda: complete(generate(MODEL, [[1]], 2, sampler, processors=processors)))


@pytest.mark.parametrize(
    "chosen", [None, 1, 1.5, torch.tensor(1), torch.tensor([1.5]), torch.tensor([[1]]), [V], [1, 1]]
)
def test_a_sampler_that_gives_no_tokens(chosen: Any) -> None:
    words = "must choose one token below"
    says(words, lambda: complete(generate(MODEL, [[1]], 2, lambda *logits: chosen)))


def test_processors_and_their_tokens_are_lists() -> None:
    says("5 is no processor", lambda: complete(generate(MODEL, [[1]], 2, processors=[5])))
    says("tokens=5 must be a list, as [5] is", lambda: forbid(5))
    says("tokens='ab' must be a list", lambda: min_length(3, "ab"))
    says("n='3' must be an integer", lambda: min_length("3", [1]))


@pytest.mark.parametrize("cls", [AdamW, GaLore, Muon])
def test_an_optimizer_takes_floating_point_numbers_alone(cls) -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64):
        says(f"a parameter is {dtype}", lambda d=dtype: cls([torch.zeros(2, 2, dtype=d)]))
    for lr in ("1e-3", None, [1e-3], math.nan):
        says(f"lr={lr} must be finite", lambda lr=lr: cls([torch.zeros(2, 2)], lr=lr))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1.5], "token id 1.5 is not in 0 ..."),
        ([True], "token id True is not in 0 ..."),
        (["a"], "token id 'a' is not in 0 ..."),
        ([[1, 2]], "token id [1, 2] is not in 0 ..."),
        ([-1], "token id -1 is not in 0 ..."),
        (torch.tensor([[1, 2]]), "token id tensor([1, 2]) is not in 0 ..."),
        (torch.tensor(5), "tensor(5) is no list of token ids"),
        (5, "5 is no list of token ids"),
        (None, "None is no list of token ids"),
    ],
)
def test_what_are_no_token_ids_have_no_text(ids: Any, words: str) -> None:
    tokenizer = Tokenizer.train(["some text"], 260)
    says(words, lambda: tokenizer.decode(ids))
    if words.startswith("token id"):
        says(words, lambda: list(tokenizer.stream(ids)))
    assert tokenizer.decode(torch.tensor([66, 67])) == tokenizer.decode([66, 67])


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("some text", "'some text' is no list of texts"),
        (5, "5 is no list of texts"),
        ([1, 2], "a int where a text is needed: 1"),
        (["a\ud800"], "the text holds half of a surrogate pair"),
    ],
)
def test_a_tokenizer_is_trained_on_texts(texts: Any, words: str) -> None:
    says(words, lambda: Tokenizer.train(texts, 260))
