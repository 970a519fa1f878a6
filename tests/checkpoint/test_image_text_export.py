"""Runs of the language model of an image-text model, exported as the whole model loads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from image_text import save_image_text
from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.generate.open_model import open_model
from stoker.models.hf_config import IMAGE_TEXT
from stoker.serve.served_models.adapter_weights import insert_adapter, weights_of_folder

IDS = torch.arange(2, 30)[None]
OFTEN = ("gemma3", "mistral3", "qwen3_5", "llama4")
RUNS = {name: "full" if name in ("mistral3", "idefics3") else "lora" for name in IMAGE_TEXT}
IMAGE_PART = re.compile(r"vision|visual|projector|connector")
PROCESSOR = {"image_processor_type": "SiglipImageProcessor"}


@pytest.fixture(
    scope="module", params=[pytest.param(f, marks=() if f in OFTEN else pytest.mark.exhaustive) for f in RUNS]
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run over a tiny image-text model."""
    base = tmp_path_factory.mktemp(family)
    save_image_text(base / "tiny", family, tied=family == "gemma3")
    (base / "tiny" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    lines = (json.dumps({"prompt": f"How are you? {i}", "completion": "I am well."}) for i in range(24))
    (base / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (base / "job.yaml").write_text(
        f"task: sft\nmodel: tiny\ndata: rows.jsonl\nsteps: 4\ntune: {RUNS[family]}\n"
        "train: {lr: 2e-2, batch: 4, seq_len: 64, precision: fp32}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["train", "job.yaml", "faults.restarts=0"]) == 0
    return base


@pytest.fixture(autouse=True)
def here(base: Path, monkeypatch: pytest.MonkeyPatch, in_process_replay: None) -> None:
    monkeypatch.chdir(base)


def whole_model(place: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(place, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model(input_ids=IDS).logits  # type: ignore[no-any-return]


def test_the_start_says_what_is_left_out(base: Path) -> None:
    assert "not loaded: only text is trained" in (base / "runs/job/environment.json").read_text()


def test_merged_weights_are_those_of_the_whole_model(base: Path) -> None:
    assert main(["export", "job", "--format", "merged", "--to", "out/merged"]) == 0
    ours, theirs = (load_file(Path(name) / "model.safetensors") for name in ("out/merged", "tiny"))
    assert ours.keys() == theirs.keys()
    changed = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert changed and not any(map(IMAGE_PART.search, changed))
    assert any(map(IMAGE_PART.search, ours))
    assert json.loads(Path("out/merged/preprocessor_config.json").read_text()) == PROCESSOR
    card = Path("out/merged/README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and "Only the language model was trained, on text." in card
    configs = [json.loads((Path(name) / "config.json").read_text()) for name in ("out/merged", "tiny")]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    assert configs[0]["vision_config"] == configs[1]["vision_config"]

    tuned = logits(open_run("job", base).model)
    torch.testing.assert_close(logits(whole_model("out/merged")), tuned, rtol=0, atol=1e-4)
    assert not torch.allclose(tuned, logits(whole_model("tiny")), atol=1e-2)
    served = open_model("out/merged", base).decoder.model  # as a base again
    torch.testing.assert_close(logits(served), tuned, rtol=0, atol=1e-4)


def test_an_adapter_fits_the_whole_model(base: Path, family: str) -> None:
    if RUNS[family] == "full":
        assert main(["export", "job", "--format", "adapter", "--to", "out/adapter"]) == 2
        return
    assert main(["export", "job", "--format", "adapter", "--to", "out/adapter"]) == 0
    tuned = logits(open_run("job", base).model)
    adapted = PeftModel.from_pretrained(whole_model("tiny"), "out/adapter").eval()
    assert not any("lora" in n and ("vision" in n or "visual" in n) for n, _ in adapted.named_modules())
    torch.testing.assert_close(logits(adapted), tuned, rtol=0, atol=1e-4)

    opened = insert_adapter(open_model("tiny", base), "a", weights_of_folder(Path("out/adapter")))
    torch.testing.assert_close(logits(opened.decoder.model), tuned, rtol=0, atol=1e-4)


def test_what_no_program_loads_is_refused(base: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "job", "--format", "merged", "--quantise", "int8", "--to", "out/bits"]) == 2
    assert "--quantise int8: image-text models are exported in fp32, bf16 or fp16" in capsys.readouterr().err
    assert not Path("out/bits").exists()


def test_bfloat16_weights(base: Path) -> None:
    assert main(["export", "job", "--format", "merged", "--dtype", "bf16", "--to", "out/bf16"]) == 0
    assert {t.dtype for t in load_file("out/bf16/model.safetensors").values()} == {torch.bfloat16}
