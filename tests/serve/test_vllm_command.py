"""The command line of vLLM for an adapter: what its configuration names is data, never an option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli.main import main


def _adapter(folder: Path, base: str, **more: object) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 8} | more))
    return folder


def _serve(adapter: Path) -> int:
    return main(["serve", str(adapter), "--engine", "vllm", "--print-command"])


@pytest.mark.parametrize(
    "base",
    [
        "--tool-parser-plugin=/tmp/x.py",
        "-x/y",
        "https://host/model",
        "s3://bucket/model",
        "/nowhere",
        "a\0b",
        "/" + "a" * 300,
    ],
)
def test_a_base_that_is_no_folder_and_no_hub_id_is_refused(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _serve(_adapter(tmp_path / "adapter", base)) == 2
    said = capsys.readouterr()
    assert "neither a folder nor an id of the hub" in said.err and "--base MODEL" in said.err and not said.out


def test_a_base_that_looks_like_an_option_is_a_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "--plugin=x").mkdir()
    assert _serve(_adapter(tmp_path / "adapter", "--plugin=x")) == 2
    assert (
        "vLLM would read the name --plugin=x as an option; rename the folder, or write NAME=FOLDER"
        in capsys.readouterr().err
    )
    assert main(["serve", "m=./--plugin=x", "--engine", "vllm", "--print-command"]) == 0
    assert capsys.readouterr().out.startswith(f"vllm serve {tmp_path}/--plugin=x --served-model-name m")


@pytest.mark.parametrize("base", ["org/model-1.5", "gpt2"])
def test_a_hub_id_is_passed_on(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _serve(_adapter(tmp_path / "adapter", base)) == 0
    assert capsys.readouterr().out.startswith(f"vllm serve {base} --served-model-name {base.rpartition('/')[2]} ")


@pytest.mark.parametrize(("rank", "most"), [(1, 8), (8, 8), (9, 16), (64, 64)])
def test_the_largest_rank_is_a_power_of_two(
    rank: int, most: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _serve(_adapter(tmp_path / "adapter", "org/model", r=rank)) == 0
    assert f"--max-lora-rank {most} " in capsys.readouterr().out


def test_a_nested_configuration_is_an_error_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = _adapter(tmp_path / "adapter", "org/model")
    (adapter / "adapter_config.json").write_text("[" * 100_000)
    assert _serve(adapter) == 2
    assert "adapter_config.json cannot be read" in capsys.readouterr().err


def test_an_adapter_over_a_base_that_peft_changed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _serve(_adapter(tmp_path / "adapter", "org/model", init_lora_weights="olora")) == 2
    assert "trained over a base that peft had changed" in capsys.readouterr().err


def test_an_adapter_over_weights_of_the_catalogue_is_refused_without_a_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model that peft's configuration names has other weights."""
    adapter = _adapter(tmp_path / "adapter", "org/model")
    (adapter / "stoker.json").write_text(json.dumps({"base": "small"}))
    assert _serve(adapter) == 2
    said = capsys.readouterr()
    assert "was trained over small of Stoker's catalogue" in said.err and "--format merged" in said.err and not said.out
    assert main(["serve", str(adapter), "--base", "org/other", "--engine", "vllm", "--print-command"]) == 0
    assert capsys.readouterr().out.startswith("vllm serve org/other ")
