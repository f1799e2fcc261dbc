"""The shipped model is what its record says."""

import json
import math

import pytest
import torch
from shipped import NAMES, RECORDS, each
from small_run import SMALL

from lm_from_scratch.__main__ import main as command
from lm_from_scratch.checkpoint.folders import PRETRAINED
from lm_from_scratch.checkpoint.weights import from_pretrained, load_shipped
from lm_from_scratch.pretrained import make


@each
def test_it_beats_every_baseline_but_a_compressor_that_has_read_the_text(name: str) -> None:
    """xz looks repeated phrases up in 2 MB of text; the model has to carry them in its weights."""
    record = RECORDS[name]
    bits = {name: value["bits_per_byte"] for name, value in record["baselines"].items()}
    primed = bits.pop("xz after the training text")
    assert primed < record["held_out"]["all"]["bits_per_byte"] < min(bits.values())
    uniform = record["baselines"]["uniform"]["nats_per_token"]
    assert uniform == pytest.approx(math.log(load_shipped(name)[1].vocab_size), abs=1e-3)


@each
def test_record_log_and_weights_belong_together(name: str) -> None:
    record = RECORDS[name]
    model, tokenizer = load_shipped(name)
    log = [json.loads(line) for line in (PRETRAINED / name / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, record["steps"] + 1))
    assert sum(p.numel() for p in model.parameters()) == record["parameters"]
    assert model.config.vocab_size == tokenizer.vocab_size == record["arguments"]["vocab_size"]
    assert f"--dtype {record['arguments']['dtype']} " in record["command"]
    last = log[-1]["held_out_loss"]
    # the recorded loss is of the weights in float16, the log's of the run in bfloat16
    assert record["held_out"]["all"]["nats_per_token"] == pytest.approx(last, abs=0.02)


def test_they_are_small_enough_to_ship() -> None:
    assert sum(p.stat().st_size for name in NAMES for p in (PRETRAINED / name).iterdir()) < 1e7


def test_both_had_the_same_budget() -> None:
    gpt2, qwen2 = RECORDS["gpt2-docs"], RECORDS["qwen2-docs"]
    for key in ("seed", "steps", "tokens_trained_on", "held_out_sha256"):
        assert gpt2[key] == qwen2[key], key
    assert 0.95 < qwen2["parameters"] / gpt2["parameters"] <= 1.0
    files = [PRETRAINED / name / "tokenizer.json" for name in NAMES]
    assert len({file.read_bytes() for file in files}) == 1


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'gpt9'.*gpt2-docs.*qwen2-docs"):
        load_shipped("gpt9")


def test_a_finished_run_becomes_a_shipped_model_and_an_unfinished_one_does_not(
    tmp_path, monkeypatch
) -> None:
    out, shipped = tmp_path / "run", tmp_path / "shipped"
    monkeypatch.setattr(make, "PRETRAINED", tmp_path)
    assert command(["train", "--out", str(out), *SMALL]) == 0
    for _ in range(2):  # the second replaces the first
        make.main(str(out), "shipped")
        names = ["README.md", "config.json", "log.jsonl", "model.safetensors", "record.json"]
        assert sorted(p.name for p in shipped.iterdir()) == [
            *names,
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    model = from_pretrained(shipped)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    record = json.loads((shipped / "record.json").read_text())
    assert record["steps"] == 6 and set(record["held_out"]) == {"all", "reference"}
    assert str(record["baselines"]["gzip"]["bits_per_byte"]) in (shipped / "README.md").read_text()
    assert "--preset nano --dtype float32 --out" in record["command"]  # as it was, anywhere
    log = (out / "log.jsonl").read_text().splitlines()
    (out / "log.jsonl").write_text("\n".join(log[:-1]) + "\n")
    with pytest.raises(SystemExit, match="is at step 5 of 6"):
        make.main(str(out), "shipped")
