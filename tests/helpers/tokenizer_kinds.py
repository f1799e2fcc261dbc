"""Small tokenizers of every kind that the library ``tokenizers`` builds, trained on a few lines."""

import json
from collections.abc import Callable
from functools import cache

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.text.tokenizer_classes import QWEN2_WORDS

LINES = [
    "the cat sat on the mat", "The dog's dinner: 12+30=42, isn't it?", "a list (of items) ends .",
    "naïve café, e\u0301 and Å", "def f(x):\n\treturn x  # two spaces", "你好，世界 ok",
    "😀 and 🦊!",
] * 4  # fmt: skip

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def metaspace(scheme: str, split: bool = True) -> tuple[object, object]:
    """SentencePiece's way with spaces, back and forth."""
    return (
        pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split),
        decoders.Metaspace(prepend_scheme=scheme),
    )


def trained(model, trainer, before=None, decoder=None, normalizer=None) -> tokenizers.Tokenizer:
    """A tokenizer of these parts, learned from the lines."""
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizer
    if before is not None:
        made.pre_tokenizer = before
    if decoder is not None:
        made.decoder = decoder
    made.train_from_iterator(LINES, trainer)
    return made


def bpe(before, decoder=None, normalizer=None, special=SPECIAL, alphabet=(), **options):
    """Byte-pair encoding."""
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet) + 150, special_tokens=special,
        initial_alphabet=list(alphabet), show_progress=False,
        **{k: v for k, v in options.items() if k in ("end_of_word_suffix",
                                                     "continuing_subword_prefix")},
    )  # fmt: skip
    model = models.BPE(unk_token=None if alphabet else "<unk>", **options)
    return trained(model, trainer, before, decoder, normalizer)


def byte_level(prefix_space: bool, normalizer=None) -> tokenizers.Tokenizer:
    """GPT-2's; ``prefix_space`` is the default of the library's own ``ByteLevel()``."""
    before = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return bpe(before, decoders.ByteLevel(), normalizer, alphabet=alphabet)


def byte_level_of_qwen2() -> tokenizers.Tokenizer:
    """Qwen2's: words by its own pattern."""
    before = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return bpe(before, decoders.ByteLevel(), normalizers.NFC(), alphabet=alphabet)


def byte_fallback(newer: bool) -> tokenizers.Tokenizer:
    """Llama 2's, as converted until 2024, and as ``transformers`` 5 builds it."""
    decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(content=" ", left=1),
    ])  # fmt: skip
    if newer:
        before, rewrite = pre_tokenizers.Metaspace(prepend_scheme="first", split=False), None
    else:
        before = None
        rewrite = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = [*SPECIAL, *BYTES]
    made = bpe(before, decoder, rewrite, special, fuse_unk=True, byte_fallback=True)
    return ordinary(made, BYTES)


def ordinary(made: tokenizers.Tokenizer, names: list[str]) -> tokenizers.Tokenizer:
    """The same, where these tokens are no special ones."""
    written = json.loads(made.to_str())
    written["added_tokens"] = [t for t in written["added_tokens"] if t["content"] not in names]
    return tokenizers.Tokenizer.from_str(json.dumps(written))


def unigram(scheme: str, bytes_too: bool = False) -> tokenizers.Tokenizer:
    """SentencePiece's own algorithm, as in T5; with bytes for what it does not know."""
    before, decoder = metaspace(scheme)
    special = [*SPECIAL, *BYTES] if bytes_too else SPECIAL
    trainer = trainers.UnigramTrainer(
        vocab_size=len(special) + 120, special_tokens=special, unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    if not bytes_too:
        return trained(models.Unigram(), trainer, before, decoder)
    made = trained(models.Unigram(), trainer, before)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoder])
    written = json.loads(ordinary(made, BYTES).to_str())
    written["model"]["byte_fallback"] = True
    return tokenizers.Tokenizer.from_str(json.dumps(written))


def wordpiece(cleanup: bool) -> tokenizers.Tokenizer:
    """BERT's."""
    trainer = trainers.WordPieceTrainer(vocab_size=170, special_tokens=SPECIAL, show_progress=False)
    return trained(
        models.WordPiece(unk_token="<unk>"), trainer, pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(cleanup=cleanup), normalizers.BertNormalizer(),
    )  # fmt: skip


def wordlevel() -> tokenizers.Tokenizer:
    """Whole words; it has no decoder, which is a space between two words."""
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    return trained(models.WordLevel(unk_token="<unk>"), trainer, pre_tokenizers.Whitespace())


def ends_of_words() -> tokenizers.Tokenizer:
    """GPT-1's: a token that ends a word says so."""
    return bpe(
        pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder(), normalizers.Lowercase(),
        end_of_word_suffix="</w>",
    )  # fmt: skip


def inside_of_words() -> tokenizers.Tokenizer:
    """Byte-pair encoding with WordPiece's prefix."""
    return bpe(pre_tokenizers.Whitespace(), decoders.WordPiece(), continuing_subword_prefix="##")


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": lambda: byte_level(False),
    "byte-level, space in front": lambda: byte_level(True),
    "byte-level, NFKC": lambda: byte_level(False, normalizers.NFKC()),
    "byte-level, Qwen2": byte_level_of_qwen2,
    "byte fallback, prepended": lambda: byte_fallback(False),
    "byte fallback, Metaspace": lambda: byte_fallback(True),
    "Metaspace always": lambda: bpe(*metaspace("always")),
    "Metaspace first": lambda: bpe(*metaspace("first", split=False)),
    "Metaspace never": lambda: bpe(*metaspace("never")),
    "Unigram": lambda: unigram("always"),
    "Unigram, byte fallback": lambda: unigram("first", bytes_too=True),
    "WordPiece": lambda: wordpiece(True),
    "WordPiece, no cleanup": lambda: wordpiece(False),
    "WordLevel": wordlevel,
    "</w>": ends_of_words,
    "## in BPE": inside_of_words,
}

#: What a rule puts around a text; the last two are those of BERT and RoBERTa.
RULES: dict[str, Callable[[int, int], object]] = {
    "nothing": lambda start, end: None,
    "in front": lambda start, end: template("<s> $A", start, end),
    "behind": lambda start, end: template("$A </s>", start, end),
    "around": lambda start, end: template("<s> <s> $A </s>", start, end),
    "BERT": lambda start, end: processors.BertProcessing(("</s>", end), ("<s>", start)),
    "RoBERTa": lambda start, end: processors.RobertaProcessing(("</s>", end), ("<s>", start)),
}


def template(single: str, start: int, end: int) -> object:
    """A rule of the form that today's files have."""
    return processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", start), ("</s>", end)]
    )


@cache
def kind(name: str, rule: str = "nothing") -> Tokenizer:
    """A tokenizer of a kind with a rule."""
    backend = tokenizers.Tokenizer.from_str(backend_of(name).to_str())
    made = RULES[rule](backend.token_to_id("<s>"), backend.token_to_id("</s>"))
    if made is not None:
        backend.post_processor = made
    return Tokenizer(backend, "</s>")


@cache
def backend_of(name: str) -> tokenizers.Tokenizer:
    """The library's tokenizer of a kind."""
    return KINDS[name]()
