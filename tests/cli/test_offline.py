"""Commands on a model of the offline catalogue look up no address."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gguf_of_folder import gguf_of_folder
from stoker.checkpoint.export import export_check
from stoker.cli.main import main
from stoker.models import offline_models
from stoker.serve.served_models.adapter_weights import weights_of_folder
from stoker.serve.served_models.open_served import open_served
from tiny_llama import save_tiny_llama


@pytest.fixture
def catalogue(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows, where the catalogue's model is a tiny one."""
    monkeypatch.chdir(tmp_path)
    gguf_of_folder(save_tiny_llama(tmp_path / "tiny", tokenizer), tmp_path / "packaged.gguf")
    monkeypatch.setattr(offline_models.Packaged, "path", lambda self: tmp_path / "packaged.gguf")
    rows = ({"prompt": f"Who is {i}?", "completion": f"The wind {i} is cold."} for i in range(12))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        "task: sft\nmodel: smollm2-135m\ndata: rows.jsonl\nsteps: 2\ntune: lora\nfaults: {restarts: 0}\n"
        "train: {batch: 4, seq_len: 64, precision: fp32}\n"
    )
    return tmp_path


def test_an_adapter_of_the_catalogues_model_says_that_the_hub_has_other_weights(
    catalogue: Path, in_process_replay: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.yaml"]) == 0
    capsys.readouterr()
    assert main(["export", "run", "--format", "adapter", "--to", "adapter", "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "trained over smollm2-135m" in warning and f"{hub} on the hub has other weights" in warning
    assert json.loads((catalogue / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == hub
    assert weights_of_folder(catalogue / "adapter").base == "smollm2-135m"


def test_the_catalogues_model_needs_no_network(
    catalogue: Path, monkeypatch: pytest.MonkeyPatch, in_process_replay: None, recwarn: pytest.WarningsRecorder
) -> None:
    asked: list[str] = []
    real = socket.getaddrinfo

    def look_up(host: Any, *arguments: Any, **options: Any) -> Any:
        if host not in (None, "127.0.0.1"):
            asked.append(str(host))
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(export_check, "find_spec", lambda name: None)  # llama.cpp runs in a process of its own
    assert main(["train", "run.yaml"]) == 0
    for form in ("adapter", "merged", "gguf"):
        assert main(["export", "run", "--format", form, "--to", form]) == 0
    for model in ("run", "smollm2-135m", "merged"):
        assert main(["chat", model, "--prompt", "Who is 3?", "--max-tokens", "2"]) == 0
    names = ["run", "smollm2-135m", "adapter"]
    assert {served.name for served in open_served(names, catalogue)} >= {*names}
    assert asked == []
    assert not [str(warning.message) for warning in recwarn if "peft" in warning.filename]
