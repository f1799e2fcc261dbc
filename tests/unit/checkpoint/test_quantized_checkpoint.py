"""checkpoint with quantised weights: all of it back, bit for bit, or a refusal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm_from_scratch.checkpoint.weights import (
    classifier_from_pretrained,
    from_pretrained,
    save_pretrained,
)
from lm_from_scratch.models.heads import Classifier, SequenceClassifier, TokenClassifier
from lm_from_scratch.weights import int4
from lm_from_scratch.weights.int4 import Int4Weight
from lm_from_scratch.weights.packed_int8 import PackedInt8Weight
from lm_from_scratch.weights.quantize import quantize_
from lm_from_scratch.weights.quantized_weight import QuantizedWeight

MODELS = {
    "gpt2": tiny_gpt2,
    "gpt2 of 64": lambda: tiny_gpt2(n_embd=64),  # torch's kernels take its rows
    "qwen2 tied": lambda: tiny_qwen2(tie_word_embeddings=True),
    "qwen2 untied": tiny_qwen2,
    "gpt2 sequences": lambda: SequenceClassifier(tiny_gpt2().backbone, 3).eval(),
    "gpt2 tokens": lambda: TokenClassifier(tiny_gpt2().backbone, 5).eval(),
    "qwen2 sequences": lambda: SequenceClassifier(tiny_qwen2().backbone, 3).eval(),
    "qwen2 tokens": lambda: TokenClassifier(tiny_qwen2().backbone, 5).eval(),
}

#: Bits, group and dtype; a group that divides the rows of every model, or the whole row.
FORMS = [(8, None, "float32"), (8, 4, "bfloat16"), (4, 4, "float32"), (4, 4, "bfloat16")]
CASES = [(name, *form) for name in MODELS for form in FORMS]
#: Of `make test`: each model in 8 and in 4 bits, in one of the dtypes.
QUICK = [
    (name, *form) for i, name in enumerate(MODELS) for j, form in enumerate(FORMS) if i % 2 == j % 2
]
CASES += [("gpt2 of 64", 8, None, "bfloat16"), ("gpt2 of 64", 4, 32, "bfloat16")]
IDX = token_ids(2, 9)


def quantized(name: str, bits: int, group_size: int | None, dtype: str) -> torch.nn.Module:
    torch.manual_seed(3)  # of the classifiers' heads
    model = MODELS[name]().to(getattr(torch, dtype))
    quantize_(model, bits, group_size)
    return model


def load(folder: Path) -> torch.nn.Module:
    classifies = "Classification" in (folder / "config.json").read_text()
    return (classifier_from_pretrained if classifies else from_pretrained)(folder)


@pytest.fixture
def folder(tmp_path) -> Path:
    save_pretrained(quantized("gpt2", 4, 14, "float32"), tmp_path / "m")
    return tmp_path / "m"


def edit_tensors(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, edit) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


# ------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize(
    ("name", "bits", "group_size", "dtype"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES],
)
def test_a_round_trip_changes_no_bit(tmp_path, name, bits, group_size, dtype) -> None:
    model = quantized(name, bits, group_size, dtype)
    save_pretrained(model, tmp_path / "m", max_shard_bytes=10_000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    again = load(tmp_path / "m")
    assert type(again) is type(model) and not again.training
    parameters = dict(again.named_parameters())
    for key, old in model.named_parameters():
        new = parameters[key]
        assert type(new) is type(old) and new.dtype == old.dtype and new.device == old.device
        assert new.requires_grad == old.requires_grad
        if isinstance(old, QuantizedWeight):
            assert new.group_size == old.group_size
            for part, tensor in old.parts().items():
                assert torch.equal(new.parts()[part], tensor)
    with torch.no_grad():
        assert torch.equal(again(IDX), model(IDX))


def test_a_folder_is_the_same_on_every_processor(tmp_path, monkeypatch) -> None:
    files, logits = [], []
    for block in (32, 64):  # rows in a block of 4-bit weights
        monkeypatch.setattr(int4, "block_rows", lambda block=block: block)
        save_pretrained(quantized("gpt2", 4, 4, "float32"), tmp_path / str(block))
        files.append((tmp_path / str(block) / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    for block in (32, 64):  # the folder that was written last, read with each
        monkeypatch.setattr(int4, "block_rows", lambda block=block: block)
        model = load(tmp_path / "64")
        assert model.transformer.h[0].attn.c_attn.weight.codes.shape[2] == block // 2
        with torch.no_grad():
            logits.append(model(IDX))
    assert torch.equal(*logits)


@pytest.mark.slow
def test_the_logits_are_equal_in_a_fresh_process(tmp_path) -> None:
    cases = [case for case in CASES if "float16" in case[-1]]
    for number, case in enumerate(cases):
        save_pretrained(quantized(*case), tmp_path / str(number))
    save_file({"idx": IDX}, tmp_path / "idx")
    code = """if True:
        import sys, torch
        from pathlib import Path
        from safetensors.torch import load_file, save_file
        from lm_from_scratch.checkpoint.weights import classifier_from_pretrained, from_pretrained
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        root, n = Path(sys.argv[1]), int(sys.argv[2])
        idx, logits = load_file(root / "idx")["idx"], {}
        for i in range(n):
            classifies = "Classification" in (root / str(i) / "config.json").read_text()
            read = classifier_from_pretrained if classifies else from_pretrained
            logits[str(i)] = read(root / str(i))(idx)
        save_file(logits, root / "logits")
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(len(cases))], check=True)
    logits = load_file(tmp_path / "logits")
    with torch.no_grad():
        for number, case in enumerate(cases):
            assert torch.equal(logits[str(number)], quantized(*case)(IDX)), case


def test_weights_of_several_forms_in_one_model(tmp_path) -> None:
    model = tiny_qwen2()
    quantize_(model, 4, 8, select=lambda name: "mlp" in name)
    quantize_(model, 8, 16, select=lambda name: "self_attn.q" in name)
    quantize_(model, 8, select=lambda name: name == "lm_head.weight")
    save_pretrained(model, tmp_path / "m")
    again = from_pretrained(tmp_path / "m")
    assert torch.equal(again(IDX), model(IDX))
    kinds = {name: type(p) for name, p in again.named_parameters()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] is Int4Weight
    assert kinds["lm_head.weight"] is PackedInt8Weight
    assert kinds["model.layers.0.self_attn.k_proj.weight"] is torch.nn.Parameter


def test_what_is_written(folder) -> None:
    weight = quantized("gpt2", 4, 14, "float32").transformer.h[0].attn.c_attn.weight
    name = "transformer.h.0.attn.c_attn.weight"
    tensors = load_file(folder / "model.safetensors")
    assert name not in tensors
    for part, tensor in weight.parts().items():  # in the layout of the module: (out, in)
        assert torch.equal(tensors[f"{name}.{part}"], tensor)
    assert tensors[f"{name}.codes"].shape == (84, 14) and tensors[f"{name}.scale"].shape == (84, 2)
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert described["format"] == "lm_from_scratch" and described["int4"][name] == 14


def test_a_tied_head_stays_tied_and_the_model_can_be_converted(tmp_path) -> None:
    for model in (quantized("gpt2", 8, None, "bfloat16"), quantized("qwen2 tied", 4, 8, "float16")):
        save_pretrained(model, tmp_path / "m")
        again = from_pretrained(tmp_path / "m")
        embedding = again.backbone.get_submodule("wte" if hasattr(again.backbone, "wte") else
                                                 "embed_tokens")  # fmt: skip
        assert again.head.weight is embedding.weight
        for convert in (lambda m: m.float(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu")):
            convert(again), convert(model)
            assert again.head.weight is embedding.weight
            assert {p.dtype for p in again.parameters()} == {p.dtype for p in model.parameters()}
            assert torch.equal(again(IDX), model(IDX))


def test_no_weight_becomes_numbers_on_its_way(tmp_path) -> None:
    class Largest(TorchDispatchMode):
        """The elements of the largest plain floating-point tensor that an operator made."""

        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for t in tree_leaves(result):
                plain = isinstance(t, torch.Tensor) and not isinstance(t, QuantizedWeight)
                if plain and t.is_floating_point() and not t.is_meta:
                    self.seen = max(self.seen, t.numel())
            return result

    model = quantized("qwen2 tied", 4, 8, "bfloat16")
    limit = min(p.numel() for p in model.parameters() if isinstance(p, QuantizedWeight))
    with Largest() as saving:
        save_pretrained(model, tmp_path / "m")
    with Largest() as loading:
        from_pretrained(tmp_path / "m")
    for mode in (saving, loading):  # two numbers for eight: scales and zeros of the largest weight
        assert 0 < mode.seen < 2 * max(p.numel() for p in model.parameters()) / 4
    with Largest() as decoding:
        model(IDX)
    assert decoding.seen > limit


@pytest.mark.slow
def test_a_process_killed_in_the_middle_leaves_the_old_model(folder) -> None:
    code = """if True:
        import os, signal, sys
        from tiny_models import tiny_gpt2
        from lm_from_scratch.checkpoint import tensors, weights
        from lm_from_scratch.weights.quantize import quantize_
        write = tensors.save_file
        def save_file(given, path, **kwargs):
            write(given, path, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        tensors.save_file = save_file
        model = tiny_gpt2(seed=1)
        quantize_(model)
        weights.save_pretrained(model, sys.argv[1], max_shard_bytes=10_000)
    """
    killed = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=Path(tiny_models.__file__).parent
    )
    assert killed.returncode < 0
    assert torch.equal(from_pretrained(folder)(IDX), quantized("gpt2", 4, 14, "float32")(IDX))
    save_pretrained(tiny_gpt2(), folder)  # what the dead process left is no obstacle
    assert [path.name for path in folder.parent.iterdir()] == ["m"]


# --------------------------------------------------------------------------------------- refusals

NAME = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{NAME}.codes"), f"missing {NAME}.codes"),
        (lambda t: t.pop(f"{NAME}.zero"), f"missing {NAME}.zero"),
        (lambda t: t.update({NAME: torch.zeros(112, 28)}), f"unexpected {NAME}"),
        (lambda t: t.update({f"{NAME}.bias": torch.zeros(1)}), f"unexpected {NAME}.bias"),
        (
            lambda t: t.update({f"{NAME}.codes": t[f"{NAME}.codes"][:, :13].clone()}),
            rf"{NAME}.codes has shape \(112, 13\), not \(112, 14\)",
        ),
        (
            lambda t: t.update({f"{NAME}.scale": torch.ones(112, 3)}),
            rf"{NAME}.scale has shape \(112, 3\), not \(112, 2\)",
        ),
        (
            lambda t: t.update({f"{NAME}.scale": torch.ones(2, 112)}),
            rf"{NAME}.scale has shape \(2, 112\), not \(112, 2\)",
        ),
        (
            lambda t: t.update({f"{NAME}.scale": torch.ones(112)}),
            rf"{NAME}.scale has shape \(112,\), not \(112, 2\)",
        ),
        (
            lambda t: t.update({f"{NAME}.codes": t[f"{NAME}.codes"].view(torch.int8)}),
            f"{NAME}.codes is torch.int8, not torch.uint8",
        ),
        (
            lambda t: t.update({f"{NAME}.codes": t[f"{NAME}.codes"].float()}),
            f"{NAME}.codes is torch.float32, not torch.uint8",
        ),
        (
            lambda t: t.update({f"{NAME}.scale": t[f"{NAME}.scale"].half()}),
            r"different dtypes: \['torch.float16', 'torch.float32'\]",
        ),
        (
            lambda t: t.update({f"{NAME}.scale": t[f"{NAME}.scale"].int()}),
            r"different dtypes: \['torch.float32', 'torch.int32'\]",
        ),
        (lambda t: t[f"{NAME}.scale"].view(-1)[3:4].fill_(torch.nan), f"{NAME}.scale .* finite"),
        (lambda t: t[f"{NAME}.zero"].view(-1)[3:4].fill_(torch.inf), f"{NAME}.zero .* finite"),
    ],
)
def test_damaged_parts_are_refused(folder, edit, message) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


def test_all_that_is_wrong_is_said_at_once(folder) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(f"{NAME}.codes")
        tensors[f"{NAME}.scale"] = torch.ones(112, 3)
        tensors[f"{NAME}.zero"][0] = torch.nan
        tensors["transformer.extra"] = torch.zeros(1)

    edit_tensors(folder, edit)
    with pytest.raises(ValueError) as error:
        from_pretrained(folder)
    for part in (f"missing {NAME}.codes", f"{NAME}.scale has shape", f"{NAME}.zero has numbers"):
        assert part in str(error.value)
    assert "unexpected transformer.extra" in str(error.value)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "cannot be read here.*gptq"),
        ([1], "cannot be read here"),
        ({"format": "lm_from_scratch", "int4": [NAME]}, "must be an object"),
        ({"format": "lm_from_scratch", "int4": {"h.9.mlp.c_fc.weight": 4}}, "h.9.mlp.c_fc.weight"),
        ({"format": "lm_from_scratch", "int4": {NAME: 5}}, "28 numbers cannot .* group_size=5"),
        ({"format": "lm_from_scratch", "int4": {NAME: 0}}, "group_size=0"),
        ({"format": "lm_from_scratch", "int4": {NAME: -4}}, "group_size=-4"),
        ({"format": "lm_from_scratch", "int4": {NAME: "14"}}, "group_size='14'"),
        ({"format": "lm_from_scratch", "int4": {"ln_f.weight": 4}}, "must be a matrix"),
        ({"format": "lm_from_scratch", "int8": {NAME: 14}}, f"missing {NAME[:-14]}"),
        ({"format": "lm_from_scratch"}, f"missing {NAME[:14]}"),
        (None, "missing transformer"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, described, message) -> None:
    edit_config(folder, lambda config: config.update(quantization_config=described))
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


def test_a_tensor_of_int8_where_int4_was_said_is_refused(tmp_path) -> None:
    save_pretrained(quantized("gpt2", 8, 14, "float32"), tmp_path / "m")

    def edit(config) -> None:
        described = config["quantization_config"]
        described["int4"] = described.pop("int8")

    edit_config(tmp_path / "m", edit)
    with pytest.raises(ValueError, match=r"missing .*\.zero.*"):
        from_pretrained(tmp_path / "m")


def test_scales_of_another_dtype_than_the_rest_are_not_written(tmp_path) -> None:
    model = quantized("gpt2", 8, None, "bfloat16")
    model.transformer.ln_f.float()
    with pytest.raises(ValueError, match="different dtypes"):
        save_pretrained(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", ["gpt2", "qwen2 untied", "qwen2 tokens"])
def test_transformers_refuses_the_folder(tmp_path, name) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    model = quantized(name, 8, None, "float32")
    save_pretrained(model, tmp_path / "m")
    theirs = (
        AutoModelForTokenClassification if isinstance(model, Classifier) else AutoModelForCausalLM
    )
    with pytest.raises(ValueError, match="no `quant_method` attribute"):
        theirs.from_pretrained(tmp_path / "m")
