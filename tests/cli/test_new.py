"""``stoker new``: writes recipes that pass ``stoker check`` unchanged, and never over a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli.main import main
from stoker.job.recipes import recipe_names, write_recipe


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", recipe_names())
def test_what_is_written_passes_the_check(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")  # has none of a recipe's folders
    assert main(["new", name, "-o", "mine.yaml"]) == 0
    assert main(["check", "mine.yaml"]) == 0
    assert "error" not in capsys.readouterr().err


def test_the_default_goes_to_job_yaml_and_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new"]) == 0
    assert Path("job.yaml").read_text() == write_recipe("sft-lora")
    Path("job.yaml").write_text("mine")
    assert main(["new", "sft-full"]) == 2
    assert Path("job.yaml").read_text() == "mine"
    assert "error: job.yaml: the file exists already" in capsys.readouterr().err


def test_the_next_command_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "-o", "my job.yaml"]) == 0
    assert capsys.readouterr().out.startswith("my job.yaml written; next: stoker train 'my job.yaml'\n")
    Path("other.yaml").write_text("model_name_or_path: smollm2-135m\ndataset_name: chatterbot-corpus\n")
    assert main(["import", "other.yaml", "-o", "a $job.yaml"]) == 0
    assert capsys.readouterr().out.endswith("next: stoker check 'a $job.yaml'\n")


def test_stdout_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "pretrain-10m", "-o", "-"]) == 0
    assert capsys.readouterr().out == write_recipe("pretrain-10m")
    assert main(["new", "--list"]) == 0
    listed = capsys.readouterr().out
    assert [line for line in listed.splitlines() if not line.startswith(" ")] == recipe_names()
    assert list(Path().iterdir()) == []


def test_wrong_names_and_folders_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "sft-lorra"]) == 2
    assert "write sft-lora" in capsys.readouterr().err
    assert main(["new", "-o", "no/such/folder.yaml"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert list(Path().iterdir()) == []
