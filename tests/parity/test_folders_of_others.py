"""Folders that transformers and peft wrote, with odd tokenizers and adapters: opened, generated
from, trained, saved, and opened there again."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_families import theirs
from tokenizer_kinds import (
    SPECIAL,
    byte_fallback,
    byte_level,
    byte_level_of_qwen2,
    ends_of_words,
    template,
    unigram,
    wordlevel,
    wordpiece,
)
from tokenizers import Tokenizer as Backend
from torch import nn

from lm_from_scratch.__main__ import main
from lm_from_scratch.interop.peft import load_with_adapter
from lm_from_scratch.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPT = "the cat sat"


def with_rule(backend: Backend, rule: str) -> Backend:
    backend.post_processor = template(rule, 1, 2)
    return backend


#: A family, a tokenizer, and the maps that have an adapter. `transformers` gives each tokenizer of
#: a folder with a Qwen2 the words of Qwen2's own.
FOLDERS: dict[str, tuple[str, Callable[[], Backend], list[str]]] = {
    "bytes": ("gpt2", lambda: byte_level(False), []),
    "bytes after a space": ("smollm3", lambda: byte_level(True), ["k_proj", "gate_proj"]),
    "bytes of Qwen2": ("qwen2", byte_level_of_qwen2, ["v_proj", "down_proj"]),
    "byte fallback": (
        "llama", lambda: with_rule(byte_fallback(False), "<s> $A"), ["q_proj", "up_proj"]
    ),
    "Unigram": ("mistral", lambda: unigram("always"), []),
    "Unigram, first": ("qwen3", lambda: unigram("first"), ["o_proj", "down_proj"]),
    "WordPiece": ("gpt2", lambda: wordpiece(True), ["c_attn", "c_proj"]),
    "WordLevel": ("smollm3", wordlevel, []),
    "rules on both sides": (
        "deepseek_v3", lambda: with_rule(byte_level(False), "<s> $A </s>"), ["o_proj", "kv_b_proj"]
    ),
    "end of a word": ("qwen3_moe", ends_of_words, []),
    "bytes, a rule before": (
        "gpt_oss", lambda: with_rule(byte_level(False), "<s> $A"), ["q_proj", "o_proj"]
    ),
    "Unigram, never": ("qwen3_next", lambda: unigram("never"), ["out_proj", "o_proj"]),
}  # fmt: skip


def logits(model: nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        out = model.float().eval()(torch.tensor([ids]))
    return getattr(out, "logits", out)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_others_is_opened_generated_from_trained_and_opened_there_again(
    tmp_path, capsys, name
) -> None:
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    family, make, targets = FOLDERS[name]
    folder, run = tmp_path / "base", tmp_path / "run"
    words = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL))
    backend = make()
    PreTrainedTokenizerFast(tokenizer_object=backend, **words).save_pretrained(folder)
    length = dict(n_positions=64) if family == "gpt2" else dict(max_position_embeddings=128)
    if family == "llama":
        length |= dict(attention_bias=True, mlp_bias=True)
    twin: Any = theirs(family, 4, vocab_size=backend.get_vocab_size() + 5, **length)
    twin.save_pretrained(folder)
    if targets:
        config = peft.LoraConfig(
            r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=family == "gpt2"
        )
        if family == "deepseek_v3":
            config.target_parameters = ["shared_experts.up_proj.weight"]
        twin = peft.get_peft_model(twin, config)
        twin.peft_config["default"].base_model_name_or_path = str(folder)
        folder = tmp_path / "lora"
        twin.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")

    # opened: the same tokens, the same logits
    ours = Tokenizer.load(tmp_path / "base")
    text = "the cat isn't in the world, café\n"
    assert ours.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    ids = tokenizer.encode(text)
    twin_logits = logits(twin, ids)
    torch.testing.assert_close(
        logits(load_with_adapter(folder).model, ids), twin_logits, rtol=1e-3, atol=1e-3
    )

    # generated from, with its tokens: what transformers says after the prompt
    start = ours.start(PROMPT)
    assert start == [i for n, i in enumerate(tokenizer.encode(PROMPT)) if n == 0 or i != 2]
    twin.generation_config.eos_token_id = None
    with torch.no_grad():
        row = twin.generate(torch.tensor([start]), max_new_tokens=12, do_sample=False, top_k=None)
    spoken, before = (
        tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for tokens in (row[0], start)
    )
    command = ["generate", "--model", str(folder), "--prompt", PROMPT, "--temperature", "0"]
    assert main([*command, "--ignore-eos", "--max-new-tokens", "12", "--layout", "off"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == (PROMPT + spoken.removeprefix(before)).rstrip(
        "\n"
    )

    # trained, saved, and opened there again
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(
        json.dumps({"prompt": f"the cat {n} is", "completion": f" a dog {n}."}) + "\n"
        for n in range(20)
    ))  # fmt: skip
    steps = ["--steps", "3", "--warmup", "1", "--batch-size", "4", "--block-size", "48", "--lr",
             "1e-2", "--library", "torch", "--quiet"]  # fmt: skip
    lora = [] if targets else ["--lora", "1"]
    begin = ["train", "--sft", str(rows), "--from", str(folder), "--out", str(run), *steps, *lora]
    assert main(begin) == 0, capsys.readouterr().err
    again = AutoTokenizer.from_pretrained(run / "model")
    assert again.encode(text) == ids and again.eos_token == "</s>"
    learned = logits(load_with_adapter(run / "model").model, ids)
    assert (learned - twin_logits).abs().max() > 1e-2
    model = AutoModelForCausalLM.from_pretrained(run / "model", experts_implementation="eager")
    torch.testing.assert_close(logits(model, ids), learned, rtol=1e-3, atol=1e-3)
