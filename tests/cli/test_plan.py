"""``stoker plan JOB``: the plan as words, as JSON and as a picture; what cannot fit; tables of runs."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stoker.cli.main import main
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.plan.search import TIE

JOB = """
task: pretrain
model: {model}
data: none.jsonl
{length}
train: {{seq_len: 2048, batch: 32}}
"""
CLUSTER = "device: H100\nnodes: 4\nprice: 30\ncurrency: EUR\navailability: 0.99\n"


def written(path: Path, model: str = "llama3-8b", length: str = "steps: 1000") -> Path:
    path.write_text(JOB.format(model=model, length=length))
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return written(tmp_path / "job.yaml")


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(CLUSTER)
    return path


def planned(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *map(str, words), "--json"]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_plan_as_json(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(capsys, job, "--on", "2x8xH100")
    plan = result["plan"]
    layout = plan["layout"]
    assert layout["data"] * layout["tensor"] * layout["pipeline"] * layout["context"] == 16
    assert layout["data"] * plan["micro_batch"] * plan["accumulation"] == 32
    assert plan["memory_gib"] == pytest.approx(sum(plan["memory"].values()))
    assert plan["step_time_s"] == pytest.approx(sum(plan["time"].values()))
    assert plan["memory_gib"] < plan["memory_upper_gib"] <= plan["capacity_gib"] and plan["verdict"] == "FITS"
    assert plan["tokens_per_s"] == pytest.approx(32 * 2048 / plan["step_time_s"])
    assert plan["tokens_per_s"] == pytest.approx(16 * plan["tokens_per_s_per_gpu"])
    stages = plan["stages"]
    assert len(stages) == layout["pipeline"] and sum(stage["blocks"] for stage in stages) == 32
    assert max(stage["memory_gib"] for stage in stages) == pytest.approx(plan["memory_gib"])
    assert stages[plan["fullest_stage"] - 1]["memory"] == pytest.approx(plan["memory"])
    fitting = [other for other in result["alternatives"] if other["fits"]]
    least = (1 - TIE) * plan["step_time_s"]  # of equally fast layouts the simplest is chosen
    assert fitting and all(other["step_time_s"] >= least for other in fitting)
    assert all(other["reason"] for other in result["alternatives"])
    assert result["binds"] and result["looked_at"] > 100 and result["seconds"] > 0
    assert result["cluster"]["gpus"] == 16 and result["model"]["parameters"] == 8030261248


@pytest.mark.parametrize(("model", "cluster_name"), [("llama3-8b", "2x8xH100"), ("llama3-70b", "8x8xA100-40G")])
@pytest.mark.slow
def test_one_step_in_time_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, cluster_name: str
) -> None:
    plan = planned(capsys, written(tmp_path / "job.yaml", model), "--on", cluster_name)["plan"]
    timeline, stages = plan["timeline"], plan["layout"]["pipeline"]
    assert (stages > 1) == (model == "llama3-70b")
    assert len(timeline["processes"]) == stages and timeline["of"] == plan["accumulation"]
    for process in timeline["processes"]:
        spans = process["spans"]
        assert all(a["end"] <= b["start"] for a, b in pairwise(spans))
        assert sum(span["kind"] == "forward" for span in spans) % timeline["micro_batches"] == 0
        work = sum(span["end"] - span["start"] for span in spans)
        assert process["idle"] == pytest.approx(1 - work / timeline["seconds"], abs=1e-9)
    assert max(p["spans"][-1]["end"] for p in timeline["processes"]) == timeline["seconds"]
    assert timeline["after"].items() <= plan["time"].items()
    if timeline["micro_batches"] == timeline["of"]:
        assert timeline["seconds"] < plan["step_time_s"] * 1.001


def test_the_cost_as_json(job: Path, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(capsys, job, "--on", cluster)
    run = result["run"]
    for other in result["alternatives"]:  # a layout costs what its time does
        ratio = other["step_time_s"] / result["plan"]["step_time_s"]
        assert other["price"] == pytest.approx(run["price"] * ratio, rel=0.2) and other["price"] > 0
    assert run["steps"] == 1000 and run["steps_known"] and run["tokens"] == 1000 * 32 * 2048
    assert run["price"] == pytest.approx(4 * 30 * run["hours"]) and run["currency"] == "EUR"
    assert run["hours"] * 3600 == pytest.approx(run["seconds"])
    assert run["training_hours"] == pytest.approx(run["hours"] * run["effective"])
    assert run["interruptions"] == pytest.approx(run["seconds"] / run["mean_between_interruptions_s"])
    assert 0 < run["chance_of_interruption"] < 1


def test_the_plan_in_words(job: Path, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--on", str(cluster)]) == 0
    out = capsys.readouterr().out
    said = ("32 x H100", "8.03 billion parameters", "activations", "FITS", "MFU", "EUR", "interruption", "checkpoint")
    assert all(words in out for words in (*said, "binds", "helps", "others", "plain data parallel", "┃"))
    assert max(map(len, out.splitlines())) <= 110


def test_the_size_of_a_small_model_is_in_millions(
    tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "small.yaml"
    job.write_text("task: sft\nmodel: smollm2-135m\ndata: chatterbot-corpus\ntune: lora\nsteps: 9\n")
    assert main(["plan", str(job), "--on", str(cluster)]) == 0
    assert "smollm2-135m: 135 million parameters, 4.88 million trained" in capsys.readouterr().out


def test_the_words_are_pasted_into_the_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed blocks, in a job whose own `train` gives way, are what `stoker plan` finds again."""
    assert main(["plan", str(job), "--on", "2x8xH100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.strip() == "train:")
    end = next(index for index, line in enumerate(lines) if line.startswith("step "))
    block = "\n".join(line[10:] for line in lines[start:end])
    head = "task: pretrain\nmodel: llama3-8b\ndata: none.jsonl\nsteps: 10\n"
    job.write_text(f"{head}{block.replace('train:', 'train:' + chr(10) + '  seq_len: 2048', 1)}\n")
    from stoker.job import load_job
    from stoker.job.layout import layout_of

    layout = layout_of(load_job(job).job)
    again = planned(capsys, job, "--on", "2x8xH100")
    assert again["plan"]["layout"] == {**vars(layout)}
    assert "as the job says" not in [other["called"] for other in again["alternatives"]]


def test_the_jobs_own_layout_is_compared(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(capsys, job, "parallel.data=1", "parallel.pipeline=8", "--on", "8xH100")
    own = next(other for other in result["alternatives"] if other["called"] == "as the job says")
    assert own["layout"]["pipeline"] == 8 and own["reason"]
    note = "the job's own layout has 4 processes, so it is not compared"
    assert note not in result["notes"]
    assert note in planned(capsys, job, "parallel.data=4", "--on", "8xH100")["notes"]
    assert planned(capsys, job, "parallel.recompute=full", "--on", "8xH100")["notes"] == result["notes"]


def test_a_run_whose_length_hangs_on_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = written(tmp_path / "job.yaml", length="epochs: 2")
    assert main(["plan", str(job), "--on", "8xH100"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "the number of steps in 2 epochs depends on the data" in out
        and "per billion tokens: " in out
        and "1,000 steps" in out
    )
    assert not planned(capsys, job, "--on", "8xH100")["run"]["steps_known"]


def test_a_batch_that_nobody_wrote_has_a_row_for_each_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("task: pretrain\nmodel: gpt2\ndata: none.jsonl\nsteps: 10\ntrain: {seq_len: 1024}\n")
    assert planned(capsys, path, "--on", "8x8xA100")["work"]["batch"] == 64


def test_the_picture(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    assert main(["plan", str(job), "--on", "8xA100-40GB", "--picture", str(picture), "--show"]) == 0
    out = capsys.readouterr().out
    page = ElementTree.fromstring(picture.read_text())
    words = [text.text or "" for text in page.iter("{http://www.w3.org/2000/svg}text")]
    assert any("llama3-8b on 8 x A100-40GB" in text for text in words)
    assert {"Memory at its fullest moment", "activations", "forward"} <= set(words) and "passes" in out


def test_a_picture_that_cannot_be_written(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--on", "8xH100", "--picture", str(tmp_path / "none" / "plan.svg")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_what_cannot_fit_exits_with_3_and_says_what_would(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--on", "1xT4"]) == 3
    said = capsys.readouterr()
    assert "nothing fits; the nearest is" in said.err and "available 13.2" in said.err and "would fit --on" in said.out
    result = planned(capsys, job, "--on", "1xT4", code=3)
    assert result["plan"] is None and not result["nearest"]["fits"] and result["changes"]
    for change in result["changes"]:
        assert change["fits"] and f"`{change['words']}`" in said.err
        if change["words"].startswith("--on"):
            words = ["--on", change["words"].removeprefix("--on ")]
            assert load_cluster(words[1]).gpus == change["cluster_gpus"]
        else:
            words = [change["words"], "--on", "1xT4"]
        assert planned(capsys, job, *words)["plan"]["fits"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no job is given"),
        (["nowhere.yaml", "--on", "8xH100"], "nowhere.yaml"),
        (["{job}", "--on", "8xH1000"], "`H1000` is not a device"),
        (["{job}", "train.seqlen=5", "--on", "8xH100"], "seq_len"),
        (["{job}", "model=nobody-knows-it", "--on", "8xH100"], "nobody-knows-it"),
    ],
)
def test_wrong_input_exits_with_2(words: list[str], said: str, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *(word.format(job=job) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_planning_loads_neither_torch_nor_transformers(job: Path) -> None:
    code = (
        "import sys; from stoker.cli.main import main; "
        f"main(['plan', {str(job)!r}, '--on', '8xH100', '--json']); "
        "sys.exit(len({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
