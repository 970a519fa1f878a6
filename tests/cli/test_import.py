"""``stoker import``: the job and its report, the exit codes, and no file written over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli.main import main

GIVEN = """model_name_or_path: smollm2-135m
dataset_name: chatterbot-corpus
max_length: 256
max_steps: 20
report_to: wandb
neftune_noise_alpha: 5
lora_rr: 3
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft.yaml").write_text(GIVEN)


def test_a_job_that_check_accepts_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "sft.yaml", "-o", "job.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == "job.yaml written; next: stoker check job.yaml\n"
    assert "TRL: " in err and "1 unknown" in err and "neftune_noise_alpha" in err
    assert main(["check", "job.yaml"]) == 0
    text = Path("job.yaml").read_text()
    assert "#   neftune_noise_alpha: 5 -- Stoker adds no noise to embeddings" in text
    assert "seed: 42  # TRL's default" in text
    assert main(["import", "sft.yaml", "-o", "job.yaml"]) == 2
    assert "job.yaml: the file exists already" in capsys.readouterr().err
    assert Path("job.yaml").read_text() == text


def test_without_o_the_job_goes_to_stdout_and_the_report_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "sft.yaml", "train.lr=1e-3", "steps=7"]) == 0
    out, err = capsys.readouterr()
    assert "lr: 0.001  # command line" in out and "steps: 7  # command line" in out
    assert "max_steps" not in out.split("version:")[1]
    assert "lost" in err and "lost" not in out
    assert sorted(path.name for path in Path().iterdir()) == ["sft.yaml"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "sft.yaml", "--json", "--processes", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["job"]["parallel"]["data"] == 2
    assert answer["job"]["data"] == [{"path": "chatterbot-corpus", "train_on": "everything"}]
    length = next(item for item in answer["carried"] if item["key"] == "max_length")
    assert (length["value"], length["to"], length["as"], length["where"]) == (
        256,
        "train.seq_len",
        256,
        "sft.yaml:3:13",
    )
    assert {item["key"] for item in answer["dropped"] if item["matters"]} == {"neftune_noise_alpha"}
    assert [item["key"] for item in answer["unknown"]] == ["lora_rr"]
    assert all(item["to"] and item["of"] == "TRL" for item in answer["defaults"])
    assert answer["missing"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no.yaml"], "no.yaml: there is no such file"),
        (["sft.yaml", "--from", "axolot"], "there is no importer `axolot`; write axolotl"),
        (["sft.yaml", "--processes", "0"], "at least one process trains"),
        (["sft.yaml", "train.lrr=3"], "unknown key `train.lrr`"),
        (["sft.yaml", "-o", "no/such/job.yaml"], "cannot be written"),
        (["task=sft"], "no file is given"),
    ],
)
def test_wrong_input_is_exit_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["sft.yaml"]


def test_an_override_may_be_longer_than_a_file_name(capsys: pytest.CaptureFixture[str]) -> None:
    token = "x" * 300
    assert main(["import", "sft.yaml", f"model.stop={token}"]) == 0
    assert f"stop: {token}" in capsys.readouterr().out


def test_errors_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sft.yaml").write_text(GIVEN.replace("256", "long"))
    assert main(["import", "sft.yaml", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["job"] is None
    assert (answer["errors"][0]["line"], answer["errors"][0]["column"]) == (3, 13)
