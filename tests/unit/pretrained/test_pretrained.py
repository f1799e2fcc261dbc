"""The shipped model is what its record says."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from shipped import NAMES, RECORDS, each
from small_run import SMALL

from lm_from_scratch.__main__ import main as command
from lm_from_scratch.checkpoint.folders import PRETRAINED, shipped_steps
from lm_from_scratch.checkpoint.weights import from_pretrained, load_shipped
from lm_from_scratch.instruments.storyteller import new_plots
from lm_from_scratch.pretrained import make
from lm_from_scratch.pretrained.readme import readme
from lm_from_scratch.text.asked import SMALL as SMALL_PLOT
from lm_from_scratch.text.batch import padded_batch
from lm_from_scratch.text.story_grammar import write
from lm_from_scratch.text.tasks import TASKS

#: The models that learned from Python's documentation.
DOCS = ["gpt2-docs", "qwen2-docs"]


@pytest.mark.parametrize("name", DOCS)
def test_it_beats_every_baseline_but_a_compressor_that_has_read_the_text(name: str) -> None:
    """xz looks repeated phrases up in 2 MB of text; the model has to carry them in its weights. It
    cannot add."""
    record = RECORDS[name]
    bits = {name: value["bits_per_byte"] for name, value in record["baselines"].items()}
    primed, own = bits.pop("xz after the training text"), record["held_out"]["all"]["bits_per_byte"]
    assert own < min(bits.values())
    assert (own < primed) == (name == "tasks")
    uniform = record["baselines"]["uniform"]["nats_per_token"]
    assert uniform == pytest.approx(math.log(load_shipped(name)[1].vocab_size), abs=1e-3)


@each
def test_record_log_and_weights_belong_together(name: str) -> None:
    record = RECORDS[name]
    model, tokenizer = load_shipped(name)
    log = [json.loads(line) for line in (PRETRAINED / name / "log.jsonl").read_text().splitlines()]
    every = log[1]["step"] - log[0]["step"]  # of a long run
    assert {line["step"] for line in log} >= {*range(every, record["steps"] + 1, every)}
    assert len(log) <= 4100 and log[-1]["step"] == record["steps"]
    assert sum(p.numel() for p in model.parameters()) == record["parameters"]
    assert model.config.vocab_size == tokenizer.vocab_size == record["arguments"]["vocab_size"]
    assert f"--dtype {record['arguments']['dtype']} " in record["command"]
    last = log[-1]["held_out_loss"]
    # the recorded loss is of the weights in float16, the log's of the run in bfloat16
    assert record["held_out"]["all"]["nats_per_token"] == pytest.approx(last, abs=0.02)


@each
def test_the_readme_says_what_the_record_says(name: str) -> None:
    assert (PRETRAINED / name / "README.md").read_text(encoding="utf-8") == readme(RECORDS[name])


def test_they_are_small_enough_to_ship() -> None:
    size = {n: sum(p.stat().st_size for p in (PRETRAINED / n).rglob("*")) for n in NAMES}
    assert size.pop("worlds") < 7.5e6  # at several steps of its training
    assert size["tasks"] < 2.5e6 and all(n < 5e6 for n in size.values())
    assert sum(size.values()) < 1.3e7


def test_the_steps_that_are_kept_are_the_recorded_ones_and_one_is_better_than_the_last() -> None:
    """On stories that none of them has seen. The last of them is the model itself."""
    record = RECORDS["worlds"]
    steps = [*shipped_steps("worlds")]
    assert steps == sorted(steps) == [*record["earlier_steps"], record["steps"]]
    tokenizer = load_shipped("worlds")[1]
    stories = [tokenizer.start(write(plot)) for plot in new_plots(16, SMALL_PLOT)]
    rows = padded_batch(stories, pad_token_id=0)
    seen = rows.positions[:, 1:] >= 0
    losses = []
    for step in steps:
        model, _ = load_shipped("worlds", step)
        assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.float32, True)}
        with torch.no_grad():
            logits = model(rows.idx, positions=rows.positions)[:, :-1]
        losses.append(F.cross_entropy(logits[seen], rows.idx[:, 1:][seen]).item())
    assert losses == sorted(losses, reverse=True)
    final, last = load_shipped("worlds")[0], load_shipped("worlds", steps[-1])[0]
    pairs = zip(final.parameters(), last.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_step_that_was_not_kept_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"worlds was not kept after step 7; .*1000.*6000"):
        load_shipped("worlds", 7)
    with pytest.raises(ValueError, match=r"tasks was not kept after step 7; there are \[\d+\]"):
        load_shipped("tasks", 7)


def test_both_had_the_same_budget() -> None:
    gpt2, qwen2 = RECORDS["gpt2-docs"], RECORDS["qwen2-docs"]
    for key in ("seed", "steps", "tokens_trained_on", "held_out_sha256"):
        assert gpt2[key] == qwen2[key], key
    assert 0.95 < qwen2["parameters"] / gpt2["parameters"] <= 1.0
    files = [PRETRAINED / name / "tokenizer.json" for name in DOCS]
    assert len({file.read_bytes() for file in files}) == 1


def test_of_tasks_every_character_is_a_token_and_a_chat_has_its_own() -> None:
    _, tokenizer = load_shipped("tasks")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_call|>", "<|tool_result|>"]
    assert [tokenizer.decode([i]) for i in range(5)] == special
    assert tokenizer.pieces(tokenizer.encode("add:47+38=")) == list("add:47+38=")
    said = tokenizer.chat([{"role": "user", "content": "47+38"}])
    assert tokenizer.decode(said) == ("<|im_start|>user\n47+38<|im_end|>\n<|im_start|>assistant\n")


def test_of_tasks_the_record_has_every_task_and_sizes_that_were_never_seen() -> None:
    found = RECORDS["tasks"]["exact_match"]
    assert list(found) == list(TASKS)
    for name, task in TASKS.items():
        assert found[name]["held_out"]["questions"] == 500
        unseen = [int(size) for size in found[name]["sizes"] if int(size) not in task.sizes]
        assert unseen[0] == task.sizes.stop and len(unseen) >= 2


@pytest.mark.parametrize(("question", "answer"), [("add:47+38=", "85"), ("max:17 4 93=", "93")])
def test_of_tasks_a_prompt_gets_its_answer(question: str, answer: str, capsys) -> None:
    ask = ["generate", "--model", "tasks", "--prompt", question, "--temperature", "0"]
    assert command([*ask, "--layout", "off"]) == 0
    assert capsys.readouterr().out == f"{question}{answer}\n"


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'gpt9'.*gpt2-docs.*qwen2-docs"):
        load_shipped("gpt9")


@pytest.mark.slow
def test_a_finished_run_becomes_a_shipped_model_and_an_unfinished_one_does_not(
    tmp_path, monkeypatch
) -> None:
    out, shipped = tmp_path / "run", tmp_path / "shipped"
    monkeypatch.setattr(make, "PRETRAINED", tmp_path)
    monkeypatch.setattr("lm_from_scratch.checkpoint.folders.PRETRAINED", tmp_path)
    assert command(["train", "--out", str(out), *SMALL, "--checkpoint-every", "2"]) == 0
    (out / "step-00000004" / "keep").touch()
    for minutes in ([], ["1.25"]):  # the second replaces the first
        make.main(str(out), "shipped", *minutes)
        names = ["README.md", "config.json", "log.jsonl", "model.safetensors", "record.json"]
        assert sorted(p.name for p in shipped.iterdir()) == [
            *names,
            "step-00000004",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    model = from_pretrained(shipped)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    record = json.loads((shipped / "record.json").read_text())
    assert record["earlier_steps"] == [4]
    trained = from_pretrained(out / "step-00000004").state_dict()
    for name, weight in load_shipped("shipped", 4)[0].state_dict().items():
        largest = trained[name].abs().max()  # a step of 4 bits is a fifteenth of a group's range
        assert (weight - trained[name]).abs().max() <= largest / (14 if ".mlp." in name else 200)
    assert record["core_minutes"] == 1.2 and "exact_match" not in record
    assert record["steps"] == 6 and set(record["held_out"]) == {"all", "reference"}
    assert str(record["baselines"]["gzip"]["bits_per_byte"]) in (shipped / "README.md").read_text()
    assert "--preset nano --dtype float32 --out" in record["command"]  # as it was, anywhere
    log = (out / "log.jsonl").read_text().splitlines()
    (out / "log.jsonl").write_text("\n".join(log[:-1]) + "\n")
    with pytest.raises(SystemExit, match="is at step 5 of 6"):
        make.main(str(out), "shipped")


def test_of_a_long_run_the_log_keeps_every_few_steps_and_those_with_a_held_out_loss() -> None:
    steps = [{"step": i, "held_out_loss": i / 9 if i % 1234 == 0 else None} for i in range(1, 9001)]
    kept = make.thinned(steps)
    assert [s["step"] for s in kept if s["step"] % 3 == 0] == list(range(3, 9001, 3))
    assert [s["step"] for s in kept if s["step"] % 3] == [1234, 2468, 4936, 6170, 8638]
    assert make.thinned(steps[:4000]) == steps[:4000]
