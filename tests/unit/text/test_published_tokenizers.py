"""Tokenizers of published folders: the ids, texts and chats of ``transformers``, nothing lost."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from lm_from_scratch.text import chat, tokenizer_files
from lm_from_scratch.text.corpora import reference
from lm_from_scratch.text.tokenizer import Tokenizer

TEXTS = [document.text for document in reference()[:8]]

CHATML = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{% endif %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}"""

HEADERS = """{{- bos_token }}
{%- set date = date_string if date_string is defined else strftime_now("%Y") %}
{{- "<|header|>system<|/header|>\\n\\nThe year is " + date + ".\\n" + eos_token }}
{%- for message in messages %}
    {{- '<|header|>' + message.role + '<|/header|>\\n\\n' + message.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\\n\\n' }}{%- endif %}"""

MARKED = """{%- set ns = namespace(turns=0) -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}{%- continue -%}{%- endif -%}
{%- if message.role == 'assistant' -%}
{%- set name = 'outside' -%}
{% generation %}{% set name = 'inside' %}{{ message.content + eos_token }}{% endgeneration %}
{{- name }}
{%- else -%}
{%- set ns.turns = ns.turns + 1 -%}
[{{ ns.turns }}] {{ message | tojson }} {{ message.notes is defined }} <é> & {{ tools is none }}
{%- endif -%}
{%- endfor -%}
{%- if not add_generation_prompt %} (closed){% endif -%}"""

STRICT = """{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not\\nsupported') }}
{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: user, assistant, user, ...') }}
{% endif %}
{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "marked": MARKED, "strict": STRICT}

CHATS = [
    [{"role": "user", "content": "Hello there"}],
    [
        {"role": "system", "content": "Be brief. 'Quote' <b> é e\u0301"},
        {"role": "user", "content": "What is a list?\n", "notes": None},
        {"role": "assistant", "content": " A sequence. "},
        {"role": "user", "content": "And <|im_end|> a tuple? 123"},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]

SAMPLES = [
    "",
    "the list of  spaces\n\n  and 12345 numbers",
    "e\u0301 å A\u030a",
    "😀 中文 \0",
    "a<|endoftext|>b <|im_start|>user\n<|im_end|> <tool> <|header|>x",
    " <|im_end|> ",
]


@cache
def learned() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small byte-level vocabulary with no special token, and its merges."""
    made = json.loads(Tokenizer.train(TEXTS, 400).backend.to_str())["model"]
    pieces = [token for token in made["vocab"] if token != "<|endoftext|>"]
    return {token: i for i, token in enumerate(pieces)}, [tuple(m) for m in made["merges"]]


def gpt2(folder: Path) -> Path:
    """As `transformers` 5 saves a GPT-2: the end token is the last of the vocabulary."""
    vocab, merges = learned()
    vocab = {**vocab, "<|endoftext|>": len(vocab)}
    GPT2Tokenizer(vocab=vocab, merges=merges).save_pretrained(folder)
    return folder


def qwen2(folder: Path, template: str = CHATML) -> Path:
    """As `transformers` 5 saves a Qwen2 that chats."""
    vocab, merges = learned()
    made = Qwen2Tokenizer(vocab=vocab, merges=merges, eos_token="<|im_end|>")
    made.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.add_tokens(["<tool>"])
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def older(folder: Path, template: str = CHATML) -> Path:
    """The same Qwen2 in the files that `transformers` 4.42 writes."""
    qwen2(folder, template)
    (folder / "chat_template.jinja").unlink()
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    made = json.loads(file.read_text())
    added = made["added_tokens"]
    made["model"]["merges"] = [" ".join(pair) for pair in made["model"]["merges"]]
    made["post_processor"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False
    }  # fmt: skip
    file.write_text(json.dumps(made))
    flags = {t["id"]: {k: v for k, v in t.items() if k != "id"} for t in added}
    written = {
        "add_prefix_space": False,
        "added_tokens_decoder": flags,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": [{"name": "default", "template": template}, {"name": "x", "template": ""}],
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    config.write_text(json.dumps(written))
    special = {"eos_token": flags[max(flags)], "pad_token": "<|endoftext|>"}
    special["eos_token"] = next(t for t in flags.values() if t["content"] == "<|im_end|>")
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "added_tokens.json").write_text(json.dumps({t["content"]: t["id"] for t in added}))
    (folder / "vocab.json").write_text(json.dumps(made["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(made["model"]["merges"]))
    return folder


def oldest(folder: Path, template: str = CHATML) -> Path:
    """Without `added_tokens_decoder`: what is special stands in two files of its own."""
    older(folder, template)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["added_tokens_decoder"], config["eos_token"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    made = json.loads((folder / "tokenizer.json").read_text())
    made["added_tokens"] = made["added_tokens"][:1]
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return folder


def headers(folder: Path, template: str = HEADERS) -> Path:
    """As Llama 3: a first token by the post-processor, no <|endoftext|>."""
    vocab, merges = learned()
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|eot|>", "<|header|>", "<|/header|>"])
    first = backend.token_to_id("<|begin|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|>:1 $B:1",
        special_tokens=[("<|begin|>", first)],
    )  # fmt: skip
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|eot|>"
    )
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def with_bos(folder: Path) -> Path:
    """A GPT-2 whose settings ask for a first token: with a tokenizer.json that counts no more."""
    config = json.loads((gpt2(folder) / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    return folder


def nothing_beside(folder: Path) -> Path:
    """No end token at all, and a tokenizer.json alone."""
    vocab, merges = learned()
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return folder


FOLDERS = [gpt2, qwen2, older, oldest, headers, with_bos, nothing_beside]


@cache
def both(make, tmp: Path):
    """Ours and theirs of one folder."""
    folder = tmp / make.__name__
    make(folder)
    if (folder / "tokenizer_config.json").is_file():
        return folder, Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return folder, Tokenizer.load(folder), theirs


@pytest.fixture(scope="module")
def tmp(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture(params=FOLDERS, ids=lambda make: make.__name__)
def pair(request, tmp):
    return both(request.param, tmp)


def test_ids_and_texts_are_those_of_transformers(pair) -> None:
    _, ours, theirs = pair
    assert ours.eos_token_id == theirs.eos_token_id
    for text in [*SAMPLES, TEXTS[0]]:
        assert ours.encode(text, special=True) == theirs.encode(text, add_special_tokens=False)
        assert ours.start(text, special=True) == theirs.encode(text)
        spelled = theirs(text, split_special_tokens=True)["input_ids"]
        assert ours.start(text) == spelled
        for ids in (ours.start(text), ours.start(text, special=True)):
            assert ours.decode(ids) == theirs.decode(ids)
            assert "".join(ours.stream(ids)) == theirs.decode(ids)
    assert ours.encode_batch(SAMPLES, special=True) == [ours.encode(t, True) for t in SAMPLES]


def test_an_id_without_a_token_has_no_text(pair) -> None:
    _, ours, theirs = pair
    ids = ours.encode("the list 😀")
    padded = [ours.vocab_size, *ids[:3], ours.vocab_size + 100, *ids[3:], 151_935]
    assert ours.vocab_size == len(theirs)
    assert ours.decode(padded) == theirs.decode(padded) == "the list 😀"
    assert "".join(ours.stream(padded)) == "the list 😀"
    assert ours.pieces([151_935]) == [""]
    for bad in (-1, 2**32):
        for read in (ours.decode, lambda ids: list(ours.stream(ids))):
            with pytest.raises(ValueError, match=f"token id {bad} is not in"):
                read([bad])


@settings(max_examples=60, deadline=None)
@given(text=st.text(), chosen=st.sampled_from(FOLDERS))
def test_any_text_gives_the_ids_of_transformers(tmp, text: str, chosen) -> None:
    _, ours, theirs = both(chosen, tmp)
    assert ours.start(text, special=True) == theirs.encode(text)


@pytest.mark.parametrize("make", [gpt2, older, oldest, headers])
@pytest.mark.parametrize(
    "beside",
    [
        {"mask_token": "<mask>"},
        {"extra_special_tokens": ["<extra>", "<img>"]},
        {"extra_special_tokens": {"image_token": "<img>"}},
        {"additional_special_tokens": ["<extra>"]},
        {"eos_token": None},
        {"eos_token": "</s>"},
        {"eos_token": {"content": "</s>", "normalized": False, "__type": "AddedToken"}},
        {"bos_token": "<s>", "add_bos_token": True},
    ],
    ids=str,
)
def test_special_tokens_that_only_the_settings_name(tmp_path, make, beside) -> None:
    folder = make(tmp_path / "m")
    change(folder, "tokenizer_config.json", **beside)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.eos_token_id == theirs.eos_token_id and ours.vocab_size == len(theirs)
    for text in [*SAMPLES, "a <mask>  b", "<img> <extra> r", " <s> x  </s> "]:
        ids = theirs.encode(text)
        assert ours.start(text, special=True) == ids and ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("make", [qwen2, older, oldest, headers])
def test_a_chat_is_that_of_transformers(tmp_path, make, name: str, messages) -> None:
    make(tmp_path / "m", TEMPLATES[name])
    ours, theirs = Tokenizer.load(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")
    for prompt in (True, False):
        if name == "strict" and messages[0]["role"] == "system":
            with pytest.raises(TemplateError, match="System role not\nsupported"):
                theirs.apply_chat_template(messages, add_generation_prompt=prompt)
            with pytest.raises(ValueError, match=r"these messages: System role not supported$"):
                ours.chat(messages, prompt)
            continue
        wanted = theirs.apply_chat_template(
            messages, add_generation_prompt=prompt, return_dict=False
        )
        assert ours.chat(messages, prompt) == wanted


def test_what_a_template_may_not_do(tmp_path, monkeypatch) -> None:
    bad = {
        "{{ messages.append(1) }}": "unsafe",
        "{{ ''.__class__.__mro__ }}": "unsafe",
        "{% for message in messages %}": "end of template",
        "{{ messages[0].content.x.y }}": "no attribute",
        "{{ 1 // 0 }}": "zero",
        "{{ range(10 ** 9) | list }}": "too big",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recursion",
        "{% include 'a' %}": "loader",
    }
    for template, said in bad.items():
        folder = qwen2(tmp_path / str(len(template)), template)
        with pytest.raises(ValueError, match=f"refuses these messages: .*{said}") as caught:
            Tokenizer.load(folder).chat(CHATS[0])
        assert "\n" not in str(caught.value)
    ours = Tokenizer.load(qwen2(tmp_path / "chat"))
    for messages in ([], "hello", {"role": "user"}, ["hello"], [{"content": "x"}], [{"role": 1}]):
        with pytest.raises(ValueError, match=r"a chat is a list|a message has a role"):
            ours.chat(messages)
    with pytest.raises(ValueError, match="refuses these messages"):
        ours.chat([{"role": "user"}])
    with pytest.raises(ValueError, match=r"refuses these messages: .*not JSON serializable"):
        ours.chat([{"role": "user", "content": object()}])
    monkeypatch.setattr(chat, "version", lambda name: "3.1.5")
    with pytest.raises(ValueError, match=r"jinja2 3\.1\.6 or newer"):
        ours.chat(CHATS[0])
    monkeypatch.setattr(chat, "version", lambda name: "3.10rc1")
    assert ours.chat(CHATS[0])
    with pytest.raises(ValueError, match="has no chat template"):
        Tokenizer.train(["text"], 300).chat(CHATS[0])


def test_a_folder_comes_back_byte_for_byte(pair, tmp_path) -> None:
    folder, ours, theirs = pair
    ours.save(tmp_path / "again")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    after = {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()}
    extra = after.keys() - before.keys()
    assert extra <= {"tokenizer_config.json"}
    assert {name: after[name] for name in before} == before
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert [again.encode(t) for t in SAMPLES] == [theirs.encode(t) for t in SAMPLES]
    assert again.chat_template == theirs.chat_template and again.eos_token == theirs.eos_token


def test_a_changed_tokenizer_is_written_as_it_is_and_nothing_old_stays(tmp_path) -> None:
    older(tmp_path / "m")
    ours = Tokenizer.load(tmp_path / "m")
    ours.backend.add_special_tokens(["<|new|>"])
    ours.save(tmp_path / "m")
    again = Tokenizer.load(tmp_path / "m")
    assert again.encode("<|new|>", special=True) == [ours.vocab_size - 1]
    Tokenizer.train(["text"], 300).save(tmp_path / "m")
    names = {p.name for p in (tmp_path / "m").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize(
    ("family", "reader"), [("gpt2", AutoTokenizer), ("qwen2", PreTrainedTokenizerFast)]
)
def test_transformers_reads_our_own_tokenizers(tmp_path, family: str, reader) -> None:
    """Beside a Qwen2 their AutoTokenizer takes Qwen2's rule for words, whatever the file says."""
    made = Tokenizer.train(TEXTS, 500)
    made.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    theirs = reader.from_pretrained(tmp_path)
    for text in SAMPLES:
        assert theirs.encode(text) == made.start(text, special=True)
    assert made.start("the")[0] == theirs.eos_token_id == made.eos_token_id
    theirs.save_pretrained(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert [again.start(t) for t in SAMPLES] == [made.start(t) for t in SAMPLES]


def test_a_normalizer_rewrites_the_text_first(tmp_path) -> None:
    ours = Tokenizer.load(qwen2(tmp_path / "m"))
    assert ours.decode(ours.encode("e\u0301")) == "é"
    plain = Tokenizer.load(gpt2(tmp_path / "n"))
    assert plain.decode(plain.encode("e\u0301")) == "e\u0301"


def change(folder: Path, name: str, **values) -> None:
    made = json.loads((folder / name).read_text())
    made.update(values)
    (folder / name).write_text(json.dumps(made))


def test_truncation_and_padding_of_a_file_are_off(tmp_path) -> None:
    folder = gpt2(tmp_path / "m")
    whole = [Tokenizer.load(folder).encode(text) for text in TEXTS[:3]]
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(10)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert len(backend.encode("a").ids) == 64
    ours = Tokenizer.load(folder)
    assert ours.encode_batch(TEXTS[:3]) == whole
    ours.save(tmp_path / "again")  # in the file they stay
    again = json.loads((tmp_path / "again" / "tokenizer.json").read_text())
    assert again["truncation"]["max_length"] == 10


def test_dropout_is_refused(tmp_path) -> None:
    folder = gpt2(tmp_path / "m")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    change(folder, "tokenizer.json", model={**model, "dropout": 0.1})
    with pytest.raises(ValueError, match=r"tokenizer\.json .*: dropout=0\.1"):
        Tokenizer.load(folder)
    change(folder, "tokenizer.json", model={**model, "dropout": 0.0})
    Tokenizer.load(folder)


DAMAGE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"5",
    b'"x"',
    b"\xff\xfe{}",
    b"[" * 100_000,
    b"\0" * 50,
    b"{}x",
]


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_a_damaged_file_is_one_line_that_names_it(tmp_path, file: str) -> None:
    folder = oldest(tmp_path / "m")
    whole = (folder / file).read_bytes()
    cuts = [whole[: len(whole) * i // 12] for i in range(12)]
    for damaged in [*DAMAGE, *cuts, whole + b"}", whole.replace(b"{", b"[", 1)]:
        (folder / file).write_bytes(damaged)
        with pytest.raises(ValueError, match=file.replace(".", r"\.")) as caught:
            Tokenizer.load(folder)
        assert "\n" not in str(caught.value)


ODD = [None, 5, -1, 10**30, "x", "", [], {}, [5], {"a": 1}, [["a", "b"]], True, 0.5]


def paths(value, path=()):
    """Every place in a JSON value, of long lists and objects the first two."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in list(items)[: 2 if len(value) > 40 else None]:
            yield (*path, key)
            yield from paths(inner, (*path, key))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "file"),
    [
        (older, "tokenizer.json"),
        (headers, "tokenizer.json"),
        (older, "tokenizer_config.json"),
        (oldest, "special_tokens_map.json"),
        (oldest, "added_tokens.json"),
    ],
)
def test_odd_values_anywhere_are_refused_or_harmless(tmp_path, make, file: str) -> None:
    folder = make(tmp_path / "m")
    whole = (folder / file).read_text()
    refused = tried = 0
    for number, path in enumerate(paths(json.loads(whole))):
        for odd in ODD[number % 3 :: 3]:
            place = made = json.loads(whole)
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = odd
            (folder / file).write_text(json.dumps(made))
            tried += 1
            message = outcome(folder)
            assert "\n" not in message, (path, odd)
            refused += message != ""
    assert tried >= refused > 0


def outcome(folder: Path) -> str:
    """What is said of a folder in the end; nothing if it works."""
    try:
        ours = Tokenizer.load(folder)
        ours.decode(ours.start("the list"))
        if ours.files.chat_template is not None:
            ours.chat(CHATS[0])
    except ValueError as error:
        return str(error)
    return ""


def test_two_tokens_with_one_id_and_ids_that_are_not_kept(tmp_path) -> None:
    folder = gpt2(tmp_path / "m")
    made = json.loads((folder / "tokenizer.json").read_text())
    vocab, added = made["model"]["vocab"], made["added_tokens"]
    for token, i in (("a", 70), ("a", 2**31)):
        change(folder, "tokenizer.json", model={**made["model"], "vocab": {**vocab, token: i}})
        with pytest.raises(ValueError, match=rf"tokenizer\.json .*: id {i} is too large, or"):
            Tokenizer.load(folder)
    change(folder, "tokenizer.json", model=made["model"], added_tokens=[{**added[0], "id": 7}])
    with pytest.raises(ValueError, match=r"token '<\|endoftext\|>' is to have the id 7, and"):
        Tokenizer.load(folder)


def test_an_unreadable_file_and_a_link_to_nothing(tmp_path, monkeypatch) -> None:
    folder = gpt2(tmp_path / "m")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read: Permission denied"):
            Tokenizer.load(folder)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(ValueError, match=r"no tokenizer at .*AutoTokenizer.*makes one"):
        Tokenizer.load(folder)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"no tokenizer at .*save_pretrained\(model, folder, tok"):
        Tokenizer.load(folder)


def test_a_file_of_another_name_is_read_alone(tmp_path) -> None:
    folder = qwen2(tmp_path / "m")
    (folder / "tokenizer.json").rename(folder / "other.json")
    ours = Tokenizer.load(folder / "other.json")
    assert ours.files.chat_template is None
    assert ours.decode([ours.eos_token_id]) == "<|endoftext|>"
    ours.save(tmp_path / "again")
    assert {p.name for p in (tmp_path / "again").iterdir()} <= set(tokenizer_files.NAMES)
