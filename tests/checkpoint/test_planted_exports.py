"""Exports with a fault planted into what is written are refused; sound ones say what their precision costs."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModelForCausalLM
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gguf_of_folder import gguf_of_folder
from stoker.checkpoint.export import export_check
from stoker.checkpoint.export import export_run as run_exports
from stoker.checkpoint.export import write_export as exporting
from stoker.checkpoint.export.export_run import Exported, export_run
from stoker.checkpoint.export.rounding import check_stored
from stoker.checkpoint.export.write_export import Export
from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.errors import RunFailed, UserError
from stoker.models.tuning.quantise import FORMS, packed_parameters, quantised_copy, unpacker
from tiny_llama import save_tiny_llama

ROWS = [("How are you?", "I am well, thank you."), ("What is blue?", "The sea is 🙂."), ("Who is cold?", "The wind.")]
FORMATS = ["gguf-q4_0", "gguf-q8_0", "gguf-fp16", "gguf-fp32", "merged-fp32", "merged-bf16", "adapter"]


@pytest.fixture(scope="module")
def base(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a LoRA run of a tiny Llama."""
    base = tmp_path_factory.mktemp("planted")
    save_tiny_llama(base / "tiny", tokenizer, intermediate_size=128)
    lines = (json.dumps({"prompt": f"{q} {i}", "completion": a}) for i in range(12) for q, a in ROWS)
    (base / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (base / "lora.yaml").write_text(
        "task: sft\nmodel: tiny\ndata: rows.jsonl\nsteps: 12\ntune: lora\nevaluate: {fraction: 0.2, every: 6}\n"
        "train: {lr: 1e-2, batch: 4, seq_len: 64, precision: fp32}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["train", "lora.yaml", "faults.restarts=0"]) == 0
    return base


@pytest.fixture(autouse=True)
def here(base: Path, monkeypatch: pytest.MonkeyPatch, in_process_replay: None) -> None:
    monkeypatch.chdir(base)


def exported(base: Path, wanted: str) -> Exported:
    """Exports the run in a format that the test before may have written."""
    form, _, dtype = wanted.partition("-")
    to = base / "out" / wanted
    shutil.rmtree(to, ignore_errors=True)
    return export_run(open_run("lora", base), Export(form, to, dtype or None), base)  # type: ignore[arg-type]


def test_a_tokenizer_that_gguf_cannot_express_is_refused_before_any_stage(base: Path) -> None:
    tuned, stages = open_run("lora", base), list[str]()
    tuned.tokenizer.backend_tokenizer.normalizer = Lowercase()
    with pytest.raises(UserError, match="normalizer Lowercase cannot be expressed; export as merged instead"):
        export_run(tuned, Export("gguf", base / "out" / "never"), base, stages.append)
    assert not stages


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor], list[str]], None]) -> None:
    """Changes the matrices of the first and the second layer's same projections, or of LoRA's."""
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    pair = [
        next(name for name in sorted(weights) if f"layers.{i}.mlp.up_proj" in name and "_A" not in name) for i in (0, 1)
    ]
    change(weights, pair)
    save_file(weights, file, {"format": "pt"})


def wrong_tokenizer(folder: Path) -> None:
    """Two tokens that none of the replayed texts need change places."""

    def swap(data: Any) -> None:
        words = data["model"]["vocab"]
        one, other = sorted(words, key=lambda word: words[word])[-2:]
        words[one], words[other] = words[other], words[one]

    edit_json(folder / "tokenizer.json", swap)


def wrong_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("assistant", "model"))


def swapped_layers(folder: Path) -> None:
    def swap(weights: dict[str, Tensor], pair: list[str]) -> None:
        weights[pair[0]], weights[pair[1]] = weights[pair[1]], weights[pair[0]]

    edit_weights(folder, swap)


def zeroed_layer(folder: Path) -> None:
    edit_weights(folder, lambda weights, pair: weights[pair[1]].zero_())


def wrong_scale(folder: Path) -> None:
    edit_weights(folder, lambda weights, pair: weights[pair[1]].mul_(1.1))


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        *((wanted, fault) for wanted in FORMATS for fault in (swapped_layers, zeroed_layer, wrong_scale)),
        *((w, fault) for w in ("gguf-q8_0", "merged-fp32", "adapter") for fault in (wrong_tokenizer, wrong_template)),
    ],
)
@pytest.mark.often("wrong_scale", "wrong_tokenizer")
@pytest.mark.slow
def test_a_planted_fault_is_refused(
    wanted: str, fault: Callable[[Path], None], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_card(tuned: Any, form: str, place: Path, folder: Path) -> None:
        if form != "gguf":
            fault(folder)

    def write_gguf(model: Any, tokenizer: Any, target: Path, *, dtype: Any, name: str, stops: Any, chat: bool) -> None:
        folder = base / "faulty"
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        fault(folder)
        gguf_of_folder(folder, target, dtype=dtype, stops=stops)

    monkeypatch.setattr(exporting, "write_card", write_card)
    monkeypatch.setattr(exporting, "write_gguf", write_gguf)
    with pytest.raises(RunFailed, match=r"differ|another"):
        exported(base, wanted)
    assert not (base / "out" / wanted).exists()
    shutil.rmtree(base / "out" / f"{wanted}.differs")


@pytest.mark.parametrize("wanted", FORMATS)
@pytest.mark.often("adapter", "gguf")
@pytest.mark.slow
def test_a_sound_export_says_its_loss(wanted: str, base: Path) -> None:
    done = exported(base, wanted)
    found = done.verified
    assert found.held_out and found.rows == 6 and found.tokens == 40  # also those inside a character
    assert found.difference <= found.allowed and "before" in found.line
    assert found.after == pytest.approx(found.before, abs=4 * (found.cost + found.difference) + 1e-5)
    if wanted in ("gguf-fp32", "merged-fp32", "adapter"):
        assert found.cost == 0.0 or found.cost < 1e-5
    if wanted == "gguf-q4_0":
        assert 1e-3 < found.cost < 0.5
    if wanted == "gguf-q8_0":  # rounding to 8 bits is felt, and far less than a wrong layer would be
        assert 1e-4 < found.cost < 0.05 and found.allowed < 0.2
    check_folder(base, base / "out" / wanted)


def test_transformers_replays_a_gguf_without_llamacpp(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_check, "find_spec", lambda name: None)
    found = exported(base, "gguf-q8_0").verified
    assert "transformers (llama.cpp is not installed)" in found.line
    assert found.difference <= 1e-5 < found.cost  # it computes in float32: only storing costs


def check_folder(base: Path, folder: Path) -> None:
    """An export names nothing of this machine, and its card is filled."""
    for file in folder.iterdir():
        content = file.read_bytes()
        assert str(base).encode() not in content and b"/tmp/" not in content, file.name
    card = (folder / "README.md").read_text()
    assert "[More Information Needed]" not in card and "license: unknown" in card
    events = [e for e in open_run("lora", base).folder.read_events() if e["event"] == "evaluated"]
    for line in (
        f"| held-out rows | {events[0]['loss']:.4f} | {events[-1]['loss']:.4f} |",
        "| rank | 16 |", "| lr | 0.01 |", "| steps | 12 |", "| rows.jsonl | 48 |", "| transformers | 5.",
    ):  # fmt: skip
        assert line in card, line


def test_the_command_says_the_size_and_a_much_higher_loss(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(base / "out" / "said", ignore_errors=True)
    monkeypatch.setattr(run_exports, "MUCH_WORSE", -1.0)
    assert main(["export", "lora", "--format", "gguf", "--dtype", "q8_0", "--to", "out/said"]) == 0
    said = capsys.readouterr()
    size = next((base / "out" / "said").glob("*.gguf")).stat().st_size
    assert f".gguf ({size / 1000:.1f} kB)\n" in said.out
    assert "WARNING: in q8_0 the loss is higher by" in said.err


def test_the_command_says_it(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(base / "out" / "said", ignore_errors=True)
    assert main(["export", "lora", "--format", "gguf", "--dtype", "q8_0", "--to", "out/said", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said["loss"]) == {
        "rows", "tokens", "held_out", "before", "after", "cost", "difference", "allowed",
    }  # fmt: skip
    assert f"loss {said['loss']['before']:.4f} before, {said['loss']['after']:.4f} after" in said["verified"]


def test_an_adapter_of_a_local_base_says_so(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(base / "out" / "local", ignore_errors=True)
    assert main(["export", "lora", "--format", "adapter", "--to", "out/local", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["base"] == "./tiny" and "no hub id" in json.loads(said.out)["warnings"][0]
    assert "WARNING: the base is a folder or file of this machine" in said.err
    config = json.loads((base / "out" / "local" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "./tiny"


def test_a_scale_in_the_file_itself_is_found(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of 32 weights of a q8_0 tensor, whose scale is a float16 before them."""
    from gguf import GGUFReader

    honest = exporting.write_gguf

    def write(model: Any, tokenizer: Any, target: Path, **options: Any) -> None:
        honest(model, tokenizer, target, **options)
        reader = GGUFReader(target, "r+")
        tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_down.weight")
        scale = tensor.data[:1, :2].view("float16")
        scale *= 1.2
        tensor.data.flush()

    monkeypatch.setattr(exporting, "write_gguf", write)
    with pytest.raises(RunFailed, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        exported(base, "gguf-q8_0")


def test_a_disk_that_takes_a_part_of_a_gguf_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = exporting.write_gguf

    def write(*given: Any, **options: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
        try:
            honest(*given, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(exporting, "write_gguf", write)
    to = base / "out" / "gguf-fp32"
    with pytest.raises(RunFailed, match=f"^the export could not be written to {to}: the disk took only a part of it$"):
        exported(base, "gguf-fp32")
    assert not to.exists()


@pytest.mark.parametrize(("key", "value"), [("rope.freq_base", 100.0), ("attention.layer_norm_rms_epsilon", 1e-2)])
def test_a_wrong_number_in_the_header_is_found(
    key: str, value: float, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are right and the program computes something else of them."""
    from gguf import GGUFReader

    honest = exporting.write_gguf

    def write(model: Any, tokenizer: Any, target: Path, **options: Any) -> None:
        honest(model, tokenizer, target, **options)
        field = GGUFReader(target, "r+").fields[f"llama.{key}"]
        field.parts[field.data[0]][0] = value
        field.parts[field.data[0]].base.flush() if hasattr(field.parts[field.data[0]].base, "flush") else None

    monkeypatch.setattr(exporting, "write_gguf", write)
    with pytest.raises(RunFailed, match="answers differently"):
        exported(base, "gguf-q8_0")


@pytest.mark.parametrize("fault", ["scale", "swap"])
def test_a_fault_in_fewer_bits_is_refused(fault: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")

    def broken(model: Any, quantise: str, dtype: torch.dtype) -> Any:
        held = quantised_copy(model, quantise, dtype)
        layers = held.model.layers
        if fault == "scale":
            state = layers[1].mlp.up_proj.weight.quant_state
            state.state2.absmax.mul_(1.1)
            state.offset.mul_(1.1)
        else:
            layers[0].mlp.up_proj, layers[1].mlp.up_proj = layers[1].mlp.up_proj, layers[0].mlp.up_proj
        return held

    monkeypatch.setattr(run_exports, "quantised_copy", broken)
    with pytest.raises(RunFailed, match="differs: model"):
        export_run(open_run("lora", base), Export("merged", base / "out" / fault, None, "4bit"), base)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_what_a_form_rounds_by_is_allowed_and_no_more(form: str) -> None:
    pytest.importorskip(FORMS[form].package)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter).pow(3) * 0.02)  # outliers, as trained weights have
    held = quantised_copy(model, form, torch.float32)
    assert packed_parameters(held)
    for name, layer in held.named_modules():
        unpack = unpacker(layer)
        if unpack is not None:
            trained, stored = model.get_submodule(name).weight.detach(), unpack().detach()
            check_stored(name, trained, stored, form)
            for wrong in (stored * 1.1, stored * 0.9, stored.roll(1, 0), torch.zeros_like(stored)):
                with pytest.raises(RunFailed, match="differs"):
                    check_stored(name, trained, wrong, form)


@pytest.mark.parametrize("tune", ["prefix", "p-tuning"])
@pytest.mark.slow
def test_a_library_that_generates_wrongly_is_named(tune: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As peft 0.21 does with transformers 5.24."""
    assert main(["train", "lora.yaml", f"tune={tune}", f"output={tune}", "train.lr=0.3", "faults.restarts=0"]) == 0
    tuned = open_run(tune, base)
    export_run(tuned, Export("adapter", base / "out" / tune, None), base)
    generate = PeftModelForCausalLM.generate

    def generate_otherwise(model: PeftModelForCausalLM, **options: Any) -> Tensor:
        ids = generate(model, **options)
        ids[0, -1] -= 1
        return ids

    monkeypatch.setattr(PeftModelForCausalLM, "generate", generate_otherwise)
    with pytest.raises(RunFailed, match=r"with transformers .* generates other tokens"):
        export_run(tuned, Export("adapter", base / "out" / f"{tune}-2", None), base)
