"""Every command on a folder of every family that can be opened.

The rows are the families of the package's own tables, the columns what people do with a folder. A
cell is one command line, or two, on a model of two layers; what a command computes is tested where
it is made.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import chat_tokenizer, enlarge_

from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.configs import config_from_dict
from lm_from_scratch.checkpoint.dialects import DIALECTS
from lm_from_scratch.checkpoint.published import Published
from lm_from_scratch.checkpoint.weights import from_pretrained, load_checkpoint, save_pretrained
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.generation.speculative import PromptLookup, speculate
from lm_from_scratch.interop.peft import load_lora_, save_lora
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.weights.lora import add_lora_
from lm_from_scratch.weights.quantize import quantized_weights

# ------------------------------------------------------------------------------------ the families

DECODER = dict(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0,
    eos_token_id=0, pad_token_id=None,
)  # fmt: skip
STATES = dict(
    layer_types=["linear_attention", "full_attention"], head_dim=16, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_conv_kernel_dim=3,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
NO_WAY_BACK = {"linear_attention", "heavily_compressed_attention"}  # kinds of layers
HASHES = ["hash_moe", "moe", "moe"]
#: What a small ``config.json`` of each family says, with a layer of each kind that it has.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": dict(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0,
                 eos_token_id=0),
    "qwen2": DECODER | dict(use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "llama": DECODER,
    "mistral": DECODER | dict(sliding_window=24),
    "qwen3": DECODER | dict(head_dim=12, tie_word_embeddings=True),
    "qwen3_next": DECODER | EXPERTS | STATES | dict(
        num_experts=4, shared_expert_intermediate_size=16),
    "qwen3_5_text": DECODER | STATES | dict(tie_word_embeddings=True),
    "qwen3_5_moe_text": DECODER | EXPERTS | STATES | dict(
        num_experts=4, shared_expert_intermediate_size=16),
    "qwen3_moe": DECODER | EXPERTS | dict(head_dim=12, num_experts=4, mlp_only_layers=[0]),
    "deepseek_v3": DECODER | EXPERTS | dict(
        num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8),
    "deepseek_v4": {key: value for key, value in (DECODER | EXPERTS).items() if value != 48} | dict(
        num_key_value_heads=1, n_routed_experts=4, head_dim=16, partial_rotary_factor=0.25,
        num_hidden_layers=3, q_lora_rank=16, o_groups=2, o_lora_rank=8, index_n_heads=16,
        index_head_dim=8, index_topk=3, hc_mult=2, sliding_window=8, mlp_layer_types=HASHES,
        layer_types=["sliding_attention", "compressed_sparse_attention",
                     "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 5}),
    "smollm3": DECODER | dict(no_rope_layers=[1, 0]),
    "gemma3_text": DECODER | dict(
        head_dim=12, query_pre_attn_scalar=10, sliding_window=24, sliding_window_pattern=2),
    "gemma4_text": DECODER | dict(
        num_hidden_layers=4, head_dim=12, global_head_dim=16, sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=300, attention_k_eq_v=True,
        use_double_wide_mlp=True),
    "gpt_oss": DECODER | dict(
        head_dim=12, sliding_window=24, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip


def test_the_families_are_those_of_the_package() -> None:
    assert [*CONFIGS] == ["gpt2", *DIALECTS]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), texts=(TIDES * 9,), vocab_size=290)


@dataclass(frozen=True)
class Files:
    """What the commands read."""

    model: Path
    notes: Path
    labelled: Path
    answers: Path
    pairs: Path
    prompts: Path


TIDES = "the tides turn twice a day, and the moon pulls both. "
NOTES = "\n\n".join(f"note {n}: the tides turn {n % 7} times" for n in range(40))
LABELLED = "".join(f"ripe plums {n}\tfruit\ngrey slate {n}\tstone\n" for n in range(12))
ANSWERS = [{"prompt": f"{n} and {n}:", "completion": "ab"} for n in range(16)]
PAIRS = [{"prompt": f"{n} and {n}:", "chosen": "ab", "rejected": "b"} for n in range(16)]
TIED = ("model.embed_tokens.weight", "transformer.wte.weight")  # names of a tied head
PROMPTS = ["the tides", "the moon pulls", "a day"]


@pytest.fixture(scope="session")
def folders(tokenizer, tmp_path_factory) -> Callable[[str], Files]:
    """The folder of a model of each family, and files of text: made once, and never changed."""
    root = tmp_path_factory.mktemp("families")
    texts = dict(
        notes=NOTES, labelled=LABELLED, prompts="\n".join(PROMPTS),
        answers="\n".join(map(json.dumps, ANSWERS)), pairs="\n".join(map(json.dumps, PAIRS)),
    )  # fmt: skip
    ends = dict(notes="txt", labelled="tsv", prompts="txt", answers="jsonl", pairs="jsonl")
    for name, text in texts.items():
        (root / f"{name}.{ends[name]}").write_text(text)

    def files(family: str) -> Files:
        folder = root / family
        if not folder.exists():
            config = CONFIGS[family] | {"model_type": family}
            model = build(config_from_dict(config)).eval()
            enlarge_(model, std=0.15)
            save_pretrained(model, folder, tokenizer, published=Published(config))
        return Files(folder, **{name: root / f"{name}.{ends[name]}" for name in texts})

    return files


# ------------------------------------------------------------------------------------ the commands

GREEDY = ["--temperature", "0", "--max-new-tokens", "8", "--ignore-eos"]
STEPS = [
    "--steps", "2", "--warmup", "1", "--batch-size", "4", "--block-size", "32", "--held-out", "0.2",
    "--eval-every", "0", "--quiet",
]  # fmt: skip


class Session:
    """Command lines in a folder of their own."""

    def __init__(self, files: Files, out: Path, capsys: Any) -> None:
        self.files, self.out, self.capsys = files, out, capsys

    def run(self, *words: object) -> str:
        """What the command prints; it must end well and complain of nothing."""
        code = main([*map(str, words)])
        said = self.capsys.readouterr()
        assert code == 0, said.err
        return said.out

    def greedy(self, model: Path, *more: object) -> str:
        """What a model says after the first of the prompts, token for token in float32."""
        return self.run("generate", "--model", model, "--prompt", PROMPTS[0], *GREEDY, *more)

    def train(self, *words: object, library: str = "torch") -> Path:
        """The folder of a model that goes on learning."""
        start = ["--from", self.files.model, "--out", self.out / "run", "--library", library]
        self.run("train", *words, *start, *STEPS)
        before, after = (
            load_checkpoint(f).model for f in (self.files.model, self.out / "run/model")
        )
        assert not torch.equal(
            next(before.backbone.parameters()), next(after.backbone.parameters())
        )
        return self.out / "run" / "model"


def in_python(model: Path, prompt: str, n: int = 8) -> str:
    """What :func:`generate` says greedily in float32, with the prompt."""
    tokenizer, net = Tokenizer.load(model), from_pretrained(model).float()
    ids = complete(generate(net, [tokenizer.start(prompt)], n, Sampler(temperature=0)))[0]
    return prompt + tokenizer.decode(ids)


def plain(s: Session) -> None:
    assert s.greedy(s.files.model) == in_python(s.files.model, PROMPTS[0]) + "\n"


def layouts(s: Session) -> None:
    want = s.greedy(s.files.model, "--layout", "off")
    for layout in ("rows", "columns", "packed"):
        assert s.greedy(s.files.model, "--layout", layout) == want


def in_bfloat16(s: Session) -> None:
    assert s.greedy(s.files.model, "--dtype", "bfloat16").startswith(PROMPTS[0])


def sampled(s: Session) -> None:
    words = ["generate", "--model", s.files.model, "--prompt", PROMPTS[0], "--max-new-tokens", 6]
    words += ["--min-p", 0.01, "--top-k", 50, "--repetition-penalty", 1.1, "--no-repeat-ngram", 3]
    said = s.run(*words, "--num-return-sequences", 2)
    assert said.count("--- ") == 2 and said == s.run(*words, "--num-return-sequences", 2)


def beams(s: Session) -> None:
    one = s.greedy(s.files.model, "--num-beams", 1)
    assert one.endswith(s.greedy(s.files.model))
    said = s.greedy(s.files.model, "--num-beams", 3, "--num-return-sequences", 2)
    assert said.count("--- ") == 2


def prompts(s: Session) -> None:
    said = s.run("generate", "--model", s.files.model, "--prompts", s.files.prompts, *GREEDY)
    want = [in_python(s.files.model, prompt) for prompt in PROMPTS]
    assert said == "".join(f"--- {n}\n{text}\n" for n, text in enumerate(want, start=1))


def chat(s: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    s.run("generate", "--model", s.files.model, "--chat", "--max-new-tokens", 3)


def drafts(s: Session) -> None:
    """The same tokens as without. What keeps a state cannot take drafts back, and says so."""
    folder, by_itself = s.files.model, ["--draft", s.files.model]
    model, ids = from_pretrained(folder), Tokenizer.load(folder).start(TIDES)
    greedy = Sampler(temperature=0)
    if NO_WAY_BACK & {*CONFIGS[folder.name].get("layer_types", ())}:
        with pytest.raises(ValueError, match="speculative decoding is not supported"):
            speculate(model, PromptLookup(), [ids], 12, greedy)
        words = ["generate", "--model", folder, "--prompt", PROMPTS[0], *GREEDY, *by_itself]
        assert main([*map(str, words)]) == 2
        assert "speculative decoding is not supported" in s.capsys.readouterr().err
        return
    passes = list(speculate(model, PromptLookup(), [ids], 12, greedy))
    said = [token for one in passes for token in one.tokens[0]]
    assert said == complete(generate(model, [ids], 12, greedy))[0]
    assert s.greedy(folder, *by_itself) == s.greedy(folder)


def pretraining(s: Session) -> None:
    model = s.train("--corpus", s.files.notes)
    assert s.greedy(model).startswith(PROMPTS[0])


def by_onednn(s: Session) -> None:
    s.train("--corpus", s.files.notes, library="onednn")


def measured(s: Session) -> None:
    s.train("--corpus", s.files.notes, "--dtype", "auto", library="auto")


def galore(s: Session) -> None:
    s.train("--corpus", s.files.notes, "--optimizer", "galore", "--chunked-loss")


def muon(s: Session) -> None:
    s.train("--corpus", s.files.notes, "--optimizer", "muon")


def in_backward(s: Session) -> None:
    s.train("--corpus", s.files.notes, "--update-in-backward")


def sft(s: Session) -> None:
    assert s.greedy(s.train("--sft", s.files.answers)).startswith(PROMPTS[0])


def dpo(s: Session) -> None:
    assert s.greedy(s.train("--dpo", s.files.pairs)).startswith(PROMPTS[0])


def grpo(s: Session) -> None:
    short = ["--group-size", 2, "--max-new-tokens", 3, "--kl", 0.1]
    model = s.train("--grpo", s.files.answers, *short)
    assert s.greedy(model).startswith(PROMPTS[0])


def classify(s: Session) -> None:
    model = s.train("--classify", s.files.labelled)
    lines = s.run("classify", "--model", model, "ripe plums", "grey slate").splitlines()
    assert len(lines) == 2 and all(line.startswith(("fruit\t", "stone\t")) for line in lines)
    s.run("convert", model, "--out", s.out / "half", "--dtype", "bfloat16")
    s.run("classify", "--model", s.out / "half", "ripe plums")


def quantize(s: Session, *how: object) -> None:
    out = s.out / "codes"
    assert "model written to" in s.run("quantize", s.files.model, "--out", out, *how)
    model = from_pretrained(out)
    assert any(
        "head" in name or "embed" in name or "wte" in name for name in quantized_weights(model)
    )
    said = s.run("generate", "--model", out, "--prompts", s.files.prompts, *GREEDY)
    assert said.count("--- ") == len(PROMPTS)
    assert s.greedy(out).startswith(PROMPTS[0])


def in_4_bits(s: Session) -> None:
    quantize(s, "--bits", 4, "--group-size", 8, "--dtype", "float32")


def in_8_bits(s: Session) -> None:
    quantize(s)


def convert(s: Session) -> None:
    parts, back = s.out / "parts", s.out / "back"
    s.run("convert", s.files.model, "--out", parts, "--max-shard", "30kB", "--dtype", "float64")
    s.run("convert", parts, "--out", back, "--dtype", "float32")
    want, got = (from_pretrained(folder).state_dict() for folder in (s.files.model, back))
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert len([*parts.glob("*.safetensors")]) > 1
    configs = [json.loads((f / "config.json").read_text()) for f in (s.files.model, back)]
    assert configs[0] == configs[1]


def from_half(s: Session) -> None:
    """A folder in bfloat16, as most are published, is read by every command."""
    half, codes = s.out / "half", s.out / "codes"
    s.run("convert", s.files.model, "--out", half, "--dtype", "bfloat16")
    assert s.greedy(half).startswith(PROMPTS[0])  # in the dtype that is measured to be faster
    s.run("generate", "--model", half, "--prompts", s.files.prompts, *GREEDY, "--dtype", "bfloat16")
    s.run("quantize", half, "--out", codes, "--bits", 4, "--group-size", 16)
    s.run("train", "--from", half, "--out", s.out / "run", "--sft", s.files.answers, *STEPS)


def describe(s: Session) -> None:
    said = s.run("describe", s.files.model)
    assert said.startswith(f"{s.files.model / 'config.json'}: {s.files.model.name}\n")
    assert said.count("\n") > 1 and "not known here" not in said


def lora(s: Session) -> None:
    """Adapters that are saved here compute the same in peft, on the model as transformers reads
    it, and here again."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    ours, again = from_pretrained(s.files.model), from_pretrained(s.files.model)
    add_lora_(ours, rank=2, alpha=8.0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith(".lora_b"):
                parameter.normal_(0, 0.1, generator=generator)
    save_lora(ours, s.out / "adapter")
    load_lora_(again, s.out / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(s.files.model)
    theirs = peft.PeftModel.from_pretrained(base, s.out / "adapter").eval()
    idx = torch.arange(3, 23)[None]
    with torch.no_grad():
        want = ours(idx)
        assert torch.equal(again(idx), want)
        torch.testing.assert_close(theirs(idx).logits, want, rtol=0, atol=1e-4)
        assert not torch.allclose(from_pretrained(s.files.model)(idx), want, atol=1e-2)


def adapters(s: Session) -> None:
    """Trained beside the weights, in a folder of their own, and added to the weights."""
    words = ["--from", s.files.model, "--out", s.out / "run", "--lora", 2, "--lr", 0.1, *STEPS]
    s.run("train", "--sft", s.files.answers, *words)
    adapted, merged = s.out / "run" / "model", s.out / "merged"
    s.run("convert", adapted, "--merge", "--out", merged)
    assert s.greedy(merged) == s.greedy(adapted) != s.greedy(s.files.model)


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command
    for command in (
        plain, layouts, in_bfloat16, sampled, beams, prompts, chat, drafts, pretraining, by_onednn,
        measured, galore, muon, in_backward, sft, dpo, grpo, classify, in_8_bits, in_4_bits,
        convert, from_half, describe, lora, adapters,
    )
}  # fmt: skip
#: Of the family with the oddest layers everything is tried in `make test`, of the others a text.
QUICK = "qwen3_next"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "command"),
    [
        pytest.param(
            family,
            command,
            marks=[pytest.mark.slow] * (family != QUICK and command != "plain"),
            id=f"{family}-{command}",
        )
        for family in CONFIGS
        for command in COMMANDS
    ],
)
def test_a_command_runs_on_a_folder_of_every_family(
    family, command, folders, tmp_path, capsys, monkeypatch
) -> None:
    session = Session(folders(family), tmp_path, capsys)
    more = (monkeypatch,) if command == "chat" else ()
    COMMANDS[command](session, *more)
