"""Folders as they are published, made by `transformers` with odd but legal settings: opened,
continued with the same tokens, trained a step, written, opened there again with nothing lost."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_published import FAMILIES, HEADS, edit, made, read
from tiny_models import token_ids

from lm_from_scratch.checkpoint.published import end_tokens
from lm_from_scratch.checkpoint.weights import load_checkpoint, save_pretrained
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ["a text to learn from, and some more of the text"]


@dataclass
class Folder:
    """What is odd about one."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    end: str | None = "<|endoftext|>"  # of the tokenizer
    chat: bool = False
    shards: bool = False
    mixed: bool = False


FOLDERS = {
    "padded vocabulary": Folder("Qwen2", {"vocab_size": 400, "eos_token_id": 0}),
    "list of end tokens": Folder("Qwen2", {}, {"eos_token_id": [5, 270, 271]}),
    "no end of text": Folder("Qwen2", {"eos_token_id": None}, end=None),
    "mixed dtypes": Folder("Qwen2", {"eos_token_id": 0}, mixed=True),
    "chat": Folder("Qwen2", {"eos_token_id": 2}, {"eos_token_id": [2, 0]}, "<|im_end|>", chat=True),
    "default ids, small vocabulary": Folder("GPT2"),
    "shards": Folder("GPT2", {"eos_token_id": 0, "bos_token_id": 0}, shards=True),
    "an old name of an activation": Folder(
        "GPT2", {"activation_function": "gelu_pytorch_tanh", "eos_token_id": [0, 7], "n_inner": 30}
    ),
}


def publish(odd: Folder, folder: Path) -> Any:
    """The folder, all files by transformers; the tokenizer as transformers has it."""
    special = [odd.end or "<|pad|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer.train(TEXT, 290, list(dict.fromkeys(["<|endoftext|>", *special]))).backend
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=odd.end, pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"] if odd.chat else [],
    )  # fmt: skip
    if odd.chat:
        tokenizer.chat_template = TEMPLATE
    made(folder, odd.family, **{"vocab_size": 300, **odd.settings})
    if odd.shards:
        kind = getattr(transformers, f"{odd.family}{HEADS[odd.family]}")
        model = kind.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="20KB")
    if odd.mixed:
        tensors = load_file(folder / "model.safetensors")
        tensors |= {name: tensors[name].bfloat16() for name in sorted(tensors)[::3]}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if odd.generation:
        edit(folder, "generation_config.json", **odd.generation)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("name", FOLDERS)
def test_a_published_folder_makes_the_whole_journey(name: str, tmp_path: Path) -> None:
    odd = FOLDERS[name]
    kind = getattr(transformers, f"{odd.family}{HEADS[odd.family]}")
    their_tokenizer = publish(odd, tmp_path / "theirs")
    theirs = kind.from_pretrained(tmp_path / "theirs").eval()
    checkpoint = load_checkpoint(tmp_path / "theirs")
    ours, published = checkpoint.model, checkpoint.published
    tokenizer = Tokenizer.load(tmp_path / "theirs")

    # The same tokens, up to the same end.
    prompt = token_ids(1, 6, high=290)
    ids = tokenizer.start("a text to learn")
    assert ids == their_tokenizer("a text to learn")["input_ids"]
    for start in (prompt, torch.tensor([ids])):
        whole = torch.ones_like(start)  # else a prompt that starts with token 0 starts with padding
        want = theirs.generate(
            start, attention_mask=whole, max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        ends = end_tokens(ours, published=published)
        [got] = complete(generate(ours, start, 40, Sampler(temperature=0.0), ends))
        assert got == want[0, start.shape[1] :].tolist()
        assert tokenizer.decode(got) == their_tokenizer.decode(
            [t for t in got if t < len(their_tokenizer)]
        )
    if odd.chat:
        talk = [{"role": "user", "content": "Hello"}]
        want = their_tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
        assert tokenizer.chat(talk) == want

    # Nothing is lost by a journey here, and a step of training changes nothing but the weights.
    optimizer = AdamW(ours.train().parameters(), lr=1e-3)
    causal_lm_loss(ours(prompt), prompt).backward()
    optimizer.step()
    shard = 20_000 if odd.shards else 10**9
    save_pretrained(ours.eval(), tmp_path / "ours", tokenizer, shard, published)
    for file in sorted((tmp_path / "theirs").glob("*.json")):
        if "safetensors" not in file.name:
            assert read(tmp_path / "ours", file.name) == json.loads(file.read_text()), file.name
    again = kind.from_pretrained(tmp_path / "ours").eval()
    assert again.config.to_diff_dict() == theirs.config.to_diff_dict()
    assert again.generation_config.to_dict() == theirs.generation_config.to_dict()
    with torch.no_grad():
        torch.testing.assert_close(again(prompt).logits, ours(prompt), atol=5e-5, rtol=0)
        assert not torch.equal(again(prompt).logits, theirs(prompt).logits)
    tokens = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "ours")
    assert tokens("some text")["input_ids"] == their_tokenizer("some text")["input_ids"]
    assert tokens.chat_template == their_tokenizer.chat_template
    assert tokens.special_tokens_map == their_tokenizer.special_tokens_map


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_classifier_makes_it_too(family: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(
        id2label={0: "bad", 1: "good", 2: "ugly"}, label2id={"bad": 0, "good": 1, "ugly": 2},
        problem_type="single_label_classification", pad_token_id=0, eos_token_id=[2, 3],
    )  # fmt: skip
    head = "ForSequenceClassification"
    made(tmp_path / "theirs", family, head, **settings)
    checkpoint, idx = load_checkpoint(tmp_path / "theirs"), token_ids(2, 8)
    ours = checkpoint.model
    optimizer = AdamW(ours.train().parameters(), lr=1e-3)
    torch.nn.functional.cross_entropy(ours(idx), torch.tensor([0, 2])).backward()
    optimizer.step()
    save_pretrained(ours.eval(), tmp_path / "ours", published=checkpoint.published)
    assert read(tmp_path / "ours") == read(tmp_path / "theirs")
    again = getattr(transformers, family + head).from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(idx).logits, ours(idx), atol=5e-5, rtol=0)
