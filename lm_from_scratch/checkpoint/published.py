"""A stand-in until the real one is merged."""

from typing import Any

from lm_from_scratch.models.heads import Classifier


def end_tokens(model: Any, tokenizer: Any = None) -> list[int]:
    ids = model.config.eos_token_id
    ids = getattr(tokenizer, "eos_token_id", None) if ids is None else ids
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return [token for token in ids if 0 <= token < model.config.vocab_size]


def labels(model: Classifier) -> list[str]:
    return [f"LABEL_{i}" for i in range(model.score.out_features)]
