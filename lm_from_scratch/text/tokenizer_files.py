"""The files of a published tokenizer: read whole, and written back byte for byte.

``tokenizer.json`` holds the vocabulary and its rules. What stands beside it says which token ends a
text, which tokens are special, and how a chat becomes text: ``tokenizer_config.json``, and in
older folders ``special_tokens_map.json`` and ``added_tokens.json``, in newer ones
``chat_template.jinja``, and ``additional_chat_templates`` with more of them. They are read as
``transformers`` reads them.

No file is trusted: whatever is damaged is a ``ValueError`` of one line that names the file.
"""

import json
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, processors

from lm_from_scratch.files import whole_file
from lm_from_scratch.limits import shown
from lm_from_scratch.text import tokenizer_classes
from lm_from_scratch.text.tokenizer_classes import class_of, follow_class

#: A folder of further templates, ``NAME.jinja``; they are not used here, but not lost either.
TEMPLATES = "additional_chat_templates"

#: A tokenizer is these files, or some of them; ``tokenizer.json`` is always there.
NAMES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    TEMPLATES,
    "tokenizer_config.json",
)

#: The special tokens that have a name of their own.
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

#: No vocabulary is as large: a greater id is damage, and a model of that size fits nowhere.
MAX_ID = 2**24


@dataclass(frozen=True)
class TokenizerFiles:
    """What stands beside a ``tokenizer.json``, and that file itself, as it was.

    ``settings`` is ``tokenizer_config.json`` with the older files merged into it.
    """

    contents: Mapping[str, bytes] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens with a name: ``eos_token`` and others, where the files set them."""
        named = {f"{name}_token": self.settings.get(f"{name}_token") for name in NAMED}
        return {name: token["content"] for name, token in named.items() if token is not None}

    def end_token(self, usual: str) -> str | None:
        """The token that ends a text; the ``usual`` one where the files say nothing about it."""
        return self.special_tokens.get("eos_token", None if "eos_token" in self.settings else usual)

    @property
    def chat_template(self) -> str | None:
        """The template of a chat, if there is one; of several the one that is called default."""
        if (written := self.contents.get("chat_template.jinja")) is not None:
            return written.decode()
        return self.settings.get("chat_template")


NO_FILES = TokenizerFiles()


@contextmanager
def one_line(what: object) -> Iterator[None]:
    """Makes every error of the library, which raises bare ``Exception`` or panics, a ``ValueError``
    that begins with ``what``."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"{what}: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error


def check_ids(ids: Any) -> list[int]:
    """The token ids as a list of integers. Raises ``ValueError`` for what are none."""
    try:
        return [check_id(token) for token in ids]
    except TypeError as error:  # one alone
        raise ValueError(f"{shown(ids)} is no list of token ids") from error


def check_id(token: Any) -> int:
    """A token id as an integer. Raises ``ValueError`` for what is none."""
    try:
        number = -1 if isinstance(token, bool) else operator.index(token)
    except TypeError:
        number = -1
    if not 0 <= number < 2**32:
        raise ValueError(f"token id {shown(token)} is not in 0 ... {2**32 - 1}")
    return number


def checked(texts: Any) -> Iterator[str]:
    """Each text, once it is known to be one. Raises ``ValueError`` as :func:`check_texts`."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ValueError(f"{shown(texts)} is no list of texts")
    for text in texts:
        check_texts([text])
        yield text


def check_texts(texts: Any) -> None:
    """Raises ``ValueError`` for anything but a list of texts, and for text that is not Unicode."""
    if isinstance(texts, str):
        raise ValueError("one text where several are needed: encode takes one, encode_batch a list")
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"a {type(text).__name__} where a text is needed: {str(text)[:60]}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds half of a surrogate pair, {text[error.start]!r}, at index "
                f"{error.start}: it is not Unicode and has no UTF-8 bytes"
            ) from error


def read(path: Path) -> tuple[tokenizers.Tokenizer, TokenizerFiles]:
    """The tokenizer of a folder, or of one file. Raises ``ValueError`` if it cannot be read."""
    path = path / "tokenizer.json" if path.is_dir() else path
    alone = path.name != "tokenizer.json"
    files = {"tokenizer.json": path} if alone else files_in(path.parent)
    from_merges = not alone and not path.is_file() and {"vocab.json", "merges.txt"} <= files.keys()
    if not path.is_file() and not from_merges:
        raise ValueError(f"no tokenizer at {path}: a tokenizer.json file is needed{advice(path)}")
    contents = read_bytes(files)
    for name in contents:
        with one_line(f"{files[name]} is not UTF-8 text"):
            contents[name].decode()
    with one_line(path.parent):  # every message names the file itself
        settings = _settings(contents)
    if not class_of(settings) and (from_merges or "add_prefix_space" in settings):
        with one_line(path.parent):
            settings["tokenizer_class"] = FAMILIES.get(_model_type(path.parent))
    if from_merges:
        contents["tokenizer.json"] = _of_merges(path, settings)
    stored = TokenizerFiles(contents, settings)
    with one_line(f"{path} is not a tokenizer.json that can be read"):
        return _backend(stored), stored


def _of_merges(path: Path, settings: Mapping[str, Any]) -> bytes:
    """What would stand at ``path``, by the ``vocab.json`` and ``merges.txt`` beside it."""
    if rule := tokenizer_classes.unknown(settings):
        raise ValueError(
            f"no tokenizer at {path}: of {rule}, merges.txt alone is not enough{advice(path)}"
        )
    with one_line(f"{path.parent} has a merges.txt or vocab.json that cannot be read"):
        backend = tokenizer_classes.from_merges(path.parent, class_of(settings))
    return backend.to_str(pretty=True).encode()


def advice(path: Path) -> str:
    """What makes a ``tokenizer.json`` where there is none at ``path``, of the files beside it."""
    folder = path.parent

    def written(path: Path) -> str:
        return json.dumps(str(path))  # a string of Python, too

    if (folder / "tekken.json").is_file():
        code = (
            "from transformers.integrations.mistral import convert_tekken_tokenizer as read; "
            f"read({written(folder / 'tekken.json')}).save_pretrained({written(folder)})"
        )
        return f": pip install transformers mistral-common; python -c {quote(code)} makes one"
    names = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json")
    if any((folder / name).is_file() for name in names):
        code = (
            "from transformers import AutoTokenizer as read; "
            f"read.from_pretrained({written(folder)}).save_pretrained({written(folder)})"
        )
        install = "pip install transformers sentencepiece protobuf"
        return f": {install}; python -c {quote(code)} makes one"
    return ": save_pretrained(model, folder, tokenizer) writes one"


#: Which tokenizer a model has whose folder does not name it.
FAMILIES = {
    "gpt2": "GPT2Tokenizer",
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
}


def _model_type(folder: Path) -> str:
    """What ``config.json`` of the folder calls the model; nothing without it."""
    file = folder / "config.json"
    contents = read_bytes({"config.json": file}) if file.is_file() else {"config.json": b"{}"}
    return str(_object(contents, "config.json").get("model_type"))


def write(backend: tokenizers.Tokenizer, files: TokenizerFiles, eos: int | None, to: Path) -> None:
    """Write all files into the folder ``to``.

    One that was read and not changed is written as it was. One without a ``tokenizer_config.json``
    gets a small one, so that ``transformers`` knows the end token and keeps to the file. Beside a
    Qwen2 its ``AutoTokenizer`` cuts words by Qwen2's own rule all the same:
    ``PreTrainedTokenizerFast`` does not.
    """
    contents = dict(files.contents)
    if not contents or _backend(files).to_str() != backend.to_str():
        contents["tokenizer.json"] = backend.to_str(pretty=True).encode()
    name = files.settings.get("tokenizer_class")
    if name and class_of(_settings(contents)) != class_of(files.settings):  # config.json said it
        settings = {**_object(contents, "tokenizer_config.json"), "tokenizer_class": name}
        contents["tokenizer_config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    end = None if eos is None else backend.id_to_token(eos)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    contents.setdefault("tokenizer_config.json", (json.dumps(settings, indent=2) + "\n").encode())
    write_bytes(contents, to)


def with_template(
    backend: tokenizers.Tokenizer, chat_template: str, end_token: str = "<|endoftext|>"
) -> TokenizerFiles:
    """The files of a tokenizer that is made here and has a chat template."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_token,
        "chat_template": chat_template,
    }
    contents = {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }
    return TokenizerFiles(contents, _settings(contents))


def files_in(folder: Path) -> dict[str, Path]:
    """The tokenizer's files that a folder has, by name; ``additional_chat_templates/NAME.jinja``
    is a name, too."""
    paths = [*(folder / name for name in NAMES), *(folder / TEMPLATES).glob("*.jinja")]
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}


def read_bytes(files: Mapping[str, Path]) -> dict[str, bytes]:
    """What the files hold. Raises ``ValueError`` for one that cannot be read."""
    contents = {}
    for name, path in files.items():
        try:
            contents[name] = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return contents


def write_bytes(contents: Mapping[str, bytes], to: Path) -> None:
    """Write these files into the folder ``to``, each whole or not at all; ``tokenizer.json`` last.
    Those of another tokenizer go away."""
    for name, path in files_in(to).items():
        if name not in contents:
            path.unlink()
    for name in sorted(contents, key=lambda name: name == "tokenizer.json"):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(to / name) as temporary:
            temporary.write_bytes(contents[name])


def _settings(contents: Mapping[str, bytes]) -> dict[str, Any]:
    """One set of settings: special tokens as objects with ``content``, all added tokens by id, the
    chat template as text."""
    settings = _object(contents, "tokenizer_config.json")
    added = settings.get("added_tokens_decoder")
    if added is None:  # an older folder
        settings |= _object(contents, "special_tokens_map.json")
        old = _object(contents, "added_tokens.json")
        added = {i: {"content": token, "normalized": True} for token, i in old.items()}
    if not isinstance(added, dict):
        raise ValueError("tokenizer_config.json: added_tokens_decoder is no object")
    by_id = {int(i): _token("added_tokens_decoder", token) for i, token in added.items()}
    settings["added_tokens_decoder"] = dict(sorted(by_id.items()))
    for name in (f"{name}_token" for name in NAMED):
        if settings.get(name) is not None:
            settings[name] = {**_token(name, settings[name]), "special": True}
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    more = list(more.values()) if isinstance(more, dict) else more
    if not isinstance(more, list):
        raise ValueError("tokenizer_config.json: extra_special_tokens is neither list nor object")
    settings["extra_special_tokens"] = [
        {**_token("extra_special_tokens", token), "special": True} for token in more
    ]
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = settings["chat_template"] = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise ValueError("tokenizer_config.json: chat_template is no text")
    return settings


def _object(contents: Mapping[str, bytes], name: str) -> dict[str, Any]:
    with one_line(f"{name} is not valid JSON"):
        value = json.loads(contents.get(name, b"{}"))
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds no JSON object, but a {type(value).__name__}")
    return value


def _token(name: str, token: Any) -> dict[str, Any]:
    """A token as the files write it: its text, or an object with flags."""
    token = {"content": token, "normalized": False} if isinstance(token, str) else token
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        raise ValueError(f"tokenizer_config.json: {name} is no token: {str(token)[:60]}")
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {flag: token[flag] for flag in flags if flag in token}


def _backend(files: TokenizerFiles) -> tokenizers.Tokenizer:
    """The library's tokenizer with all tokens of all files, and no rule that loses text."""
    text, settings = files.contents["tokenizer.json"].decode(), files.settings
    written = json.loads(text)
    model = written["model"]
    prefix = model.get("continuing_subword_prefix")  # the library dies of one that is wrong
    if prefix and "merges" in model:  # WordPiece has none
        pairs = (pair.split() if isinstance(pair, str) else pair for pair in model["merges"])
        if not all(len(pair) == 2 and pair[1].startswith(prefix) for pair in pairs):
            raise ValueError(f"its merges do not have continuing_subword_prefix={prefix!r}")
    backend = tokenizers.Tokenizer.from_str(text)
    follow_class(backend, settings)
    backend.no_truncation()
    backend.no_padding()
    if dropout := getattr(backend.model, "dropout", None):
        raise ValueError(f"dropout={dropout} encodes a text in another way each time: set it to 0")
    added = {token["content"]: token["id"] for token in written.get("added_tokens") or []}
    for i, token in settings["added_tokens_decoder"].items():
        if backend.token_to_id(token["content"]) is None:
            backend.add_tokens([AddedToken(**token)])
        added[token["content"]] = i
    special = [settings[f"{name}_token"] for name in NAMED if settings.get(f"{name}_token")]
    special += settings["extra_special_tokens"]
    known = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    missing = [AddedToken(**token) for token in special if token["content"] not in known]
    backend.add_special_tokens(missing)
    ids = Counter(model["vocab"].values() if isinstance(model["vocab"], dict) else ())
    for i in [i for i, count in ids.items() if count > 1 or i >= MAX_ID]:
        raise ValueError(f"id {i} is too large, or belongs to two tokens")
    for token, i in added.items():
        if (number := backend.token_to_id(token)) != i:
            raise ValueError(f"token {token!r} is to have the id {i}, and has {number}")
    around(backend)  # a rule that names a missing token fails here, not at the first prompt
    return backend


def around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's rule puts in front of a text, and behind it: those around the
    one token of a text of one word."""
    one_word = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if (rule := backend.post_processor) is not None:
        one_word.post_processor = rule
    encoding = one_word.encode("a")
    place = [*encoding.special_tokens_mask, 0].index(0)
    return encoding.ids[:place], encoding.ids[place + 1 :]


def put_in_front(backend: tokenizers.Tokenizer, token: str) -> None:
    """Make it the tokenizer's rule that ``token`` stands in front of every text."""
    if ":" in token or token.startswith("$"):  # which mean something in the rule
        raise ValueError(f"end_token={token!r}: its name must not hold ':' or begin with '$'")
    backend.post_processor = processors.TemplateProcessing(
        single=[token, "$A"],
        pair=[token, "$A", token, "$B:1"],
        special_tokens=[(token, backend.token_to_id(token))],
    )
