"""What a class of ``transformers`` knows of its tokenizer that no ``tokenizer.json`` says.

``tokenizer_config.json`` names a class. Most read their rules from ``tokenizer.json``; three of
those that models here have bring their own, in which ``add_prefix_space`` of the same file counts:
whether a text gets a space in front. The ids here are to be those of ``transformers`` 5.

GPT-2 and Qwen2 also come as ``vocab.json`` and ``merges.txt`` alone: vocabulary and merges, whose
rules are those of the class.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

#: The classes whose alphabet are bytes.
BYTE_LEVEL = ("GPT2Tokenizer", "Qwen2Tokenizer")

#: How Qwen2 cuts a text into words, in each of which pairs are merged.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def class_of(settings: Mapping[str, Any]) -> str:
    """The class that the settings name, if they do; "Fast" in its name means nothing today."""
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


def follow_class(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Give a tokenizer the rules of the class that its settings name, where ``transformers`` takes
    those instead of the file's."""
    name, prefix = class_of(settings), settings.get("add_prefix_space")
    prefix = name == "LlamaTokenizer" if prefix is None else bool(prefix)  # their defaults
    rule: Any = backend.pre_tokenizer
    several = isinstance(rule, pre_tokenizers.Sequence)
    parts = [*rule] if several else [rule]
    byte_level = [part for part in parts if isinstance(part, pre_tokenizers.ByteLevel)]
    if name in BYTE_LEVEL:
        for part in byte_level:
            part.add_prefix_space = prefix
    elif name == "LlamaTokenizer" and isinstance(backend.model, models.BPE) and not byte_level:
        _as_llama(backend, prefix, bool(settings.get("legacy")))


def _as_llama(backend: tokenizers.Tokenizer, prefix: bool, legacy: bool) -> None:
    """Llama's rules: spaces are ``▁``, and one stands in front of a text that does not begin with
    one; in the older form, of any text."""
    scheme = ("always" if legacy else "first") if prefix else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        parts.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(parts)


def unknown(settings: Mapping[str, Any]) -> str | None:
    """What of the settings keeps :func:`from_merges` from making the tokenizer; None if nothing."""
    if (name := class_of(settings)) not in BYTE_LEVEL:
        return name or "a class that no file names"
    return next((key for key in ("add_bos_token", "add_eos_token") if settings.get(key)), None)


def from_merges(folder: Path, name: str) -> tokenizers.Tokenizer:
    """The tokenizer of a folder with ``vocab.json`` and ``merges.txt``, of the class ``name``:
    one of ``BYTE_LEVEL``."""
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "Qwen2Tokenizer":
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return backend
