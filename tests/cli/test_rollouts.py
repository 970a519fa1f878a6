"""``stoker rollouts``: the answers that a step learnt from, of the run's files alone."""

from __future__ import annotations

import json
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from stoker.cli.main import main
from stoker.job.load_job import load_job
from stoker.runs.run_folder import RunFolder
from stoker.train.rollouts.iteration_plan import IterationPlan
from stoker.train.rollouts.rollout import Rollout
from stoker.train.rollouts.rollout_files import ROLLOUTS, Iteration, RolloutFiles
from stoker.train.rollouts.step_rollouts import rollouts_of_step
from tiny_llama import save_tiny_llama

JOB = """task: grpo
model: ../tiny
data: asked.jsonl
steps: 4
train: {batch: 4}
grpo: {rewards: [numeric, exact], prompts: 2, answers: 4, epochs: 1}
"""
TEXTS = ("It is 5.", "It is \x1b[31m6", "\u00e9\u4e2d", "no idea")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A run of two iterations of two prompts, of two steps each; its model has no weights."""
    base = tmp_path_factory.mktemp("shown")
    model = save_tiny_llama(base / "tiny", tokenizer, template=None)
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"")  # nothing may load them
    run = base / "here" / "run"
    run.mkdir(parents=True)
    (run / "job.yaml").write_text(JOB)
    (run / "events.jsonl").write_text('{"event": "started"}\n')
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "samples": {4 * n}}}\n' for n in range(1, 5)))
    for number in range(2):
        rollouts = tuple(rollout(tokenizer, number, prompt, sample) for prompt in range(2) for sample in range(4))
        RolloutFiles(run / ROLLOUTS).write(Iteration(number, 2 * number + 1, 2, rollouts, {"score": 0.5}))
    return run


def rollout(tokenizer: Tokenizer, number: int, prompt: int, sample: int) -> Rollout:
    ids = np.array(tokenizer.encode(TEXTS[sample], add_special_tokens=False).ids)
    asked = np.array(tokenizer.encode(f"What is 2 + {3 + prompt}?", add_special_tokens=False).ids)
    old = -np.linspace(0.1, 1.0, len(ids), dtype=np.float32)
    values = {"old": old, "reference": old - 0.5, "advantage": np.full_like(old, 1.0 - sample), "entropy": -old}
    score = 1.0 - sample / 4 - prompt / 100
    rewards = {"numeric": score, "exact": 0.0}
    return Rollout(
        2 * number + prompt, sample, "asked.jsonl", prompt + 1, asked, ids, "stop", rewards, score, values
    )  # fmt: skip


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)


def test_samples_that_training_went_past_are_not_those_of_a_step(folder: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(folder, tmp_path / "run"))
    run.metrics.write_text('{"step": 1, "samples": 4}\n{"step": 2, "samples": 12}\n')  # 4 to 7 are skipped
    found = rollouts_of_step(run, load_job(run.job).job, 2)
    assert len(found.rollouts) == 4 and [iteration.number for iteration in found.iterations] == [1]


def test_a_step_may_reach_into_the_next_iteration(folder: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(folder, tmp_path / "run"))
    run.job.write_text(JOB.replace("batch: 4", "batch: 6"))  # no whole groups of 4 answers, so their order is mixed
    lines = ('{"step": 1, "samples": 4, "first_sample": 0}', '{"step": 2, "samples": 10, "first_sample": 4}')
    run.metrics.write_text("\n".join(lines) + "\n")
    found = rollouts_of_step(run, load_job(run.job).job, 2)
    plan = IterationPlan(2, 4, 1, 6, 0)
    mixed = [plan.order(0, 0, 8)[4:].tolist(), plan.order(1, 0, 8)[:2].tolist()]
    assert any(indices != sorted(indices) for indices in mixed)
    expected = [(2 * number + i // 4, i % 4) for number, indices in enumerate(mixed) for i in sorted(indices)]
    assert [(rollout.prompt, rollout.sample) for rollout in found.rollouts] == expected
    assert [iteration.number for iteration in found.iterations] == [0, 1]


def test_a_short_last_step_has_the_samples_that_it_began_with(folder: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(folder, tmp_path / "run"))
    lines = ('{"step": 1, "samples": 4, "first_sample": 0}', '{"step": 2, "samples": 10, "first_sample": 8}')
    run.metrics.write_text("\n".join(lines) + "\n")  # 4 to 7 are skipped, and the run has 10
    found = rollouts_of_step(run, load_job(run.job).job, 2)
    assert len(found.rollouts) == 2 and [iteration.number for iteration in found.iterations] == [1]
    run.metrics.write_text('{"step": 1, "samples": 4}\n{"step": 2, "samples": 6}\n')  # of an earlier version
    assert len(rollouts_of_step(run, load_job(run.job).job, 2).rollouts) == 2


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["rollouts", "run", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_a_step_has_the_answers_that_it_learnt_from(capsys: pytest.CaptureFixture[str]) -> None:
    plan = IterationPlan(2, 4, 1, 4, 0)
    for step in range(1, 5):
        found = as_json(capsys, "--step", str(step))
        place = (step - 1) % 2 * 4
        iteration = (step - 1) // 2
        numbers = {divmod(i, 4) for i in plan.order(iteration, 0, 8)[place : place + 4].tolist()}
        assert found["step"] == step and found["iteration"] == iteration
        assert {(a["prompt"] - 2 * iteration, a["sample"]) for a in found["answers"]} == numbers
    assert as_json(capsys)["step"] == 4


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--step", "1")
    assert found["figures"] == {"score": 0.5} and found["iteration_step"] == 1
    for answer in found["answers"]:
        assert answer["answer_text"] == TEXTS[answer["sample"]] == "".join(answer["texts"])
        assert answer["prompt_text"] == f"What is 2 + {answer['row'] + 2}?"
        assert answer["ended"] == "stop" and answer["rewards"].keys() == {"numeric", "exact"}
        assert answer["length"] == len(answer["ids"]) == len(answer["texts"])
        assert answer["tokens"].keys() == {"old", "reference", "advantage", "entropy", "kl"}
        assert answer["tokens"]["kl"] == pytest.approx([0.5] * answer["length"])
        assert answer["kl"] == pytest.approx(0.5 * answer["length"])


def test_the_worst_come_first_and_a_limit_holds(capsys: pytest.CaptureFixture[str]) -> None:
    scores = [answer["score"] for answer in as_json(capsys, "--worst")["answers"]]
    assert len(scores) == 4 and scores == sorted(scores)
    assert [answer["score"] for answer in as_json(capsys, "--worst", "--limit", "2")["answers"]] == scores[:2]


def test_the_view_has_no_control_characters_of_an_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["rollouts", "run", "--step", "1"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[31m" not in out and "\\x1b" in out and "\x1b[30;48;2;" in out
    assert out.count("What is 2 + ") == len({line for line in out.splitlines() if "What is 2 + " in line}) == 1
    assert "numeric" in out and "ended by stop" in out and "KL " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "there is no run nothing"),
        (["run", "--step", "9"], "has no step 9; it has 1 to 4"),
        (["run", "--by", "value"], "the tokens of this run have advantage, entropy, old, reference, kl"),
        (["run", "--limit", "0"], "shows no answers"),
    ],
)
def test_wrong_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


def test_a_run_of_another_task_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = folder.parent / "other"
    other.mkdir()
    (other / "job.yaml").write_text("task: sft\nmodel: ../tiny\ndata: asked.jsonl\nsteps: 4\n")
    (other / "events.jsonl").write_text("")
    assert main(["rollouts", "other"]) == 2
    assert "trained by `task: sft`" in capsys.readouterr().err


def test_code_beside_the_tokenizer_of_a_run_needs_this_users_word(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = shutil.copytree(folder, folder.parent / "code")
    (code / "job.yaml").write_text(JOB.replace("../tiny", "{name: ../tiny, trust_remote_code: true}"))
    assert main(["rollouts", "code"]) == 2
    assert "write --trust-remote-code" in capsys.readouterr().err
    assert main(["rollouts", "code", "--trust-remote-code"]) == 0


def damaged(arrays: dict[str, np.ndarray], about: dict[str, Any], how: str) -> None:
    if how == "lengths":
        arrays["answer_lengths"] = arrays["answer_lengths"] + 1
    elif how == "negative":
        arrays["prompt_lengths"] = arrays["prompt_lengths"] * np.array([-1] + [1] * 7)
    elif how == "type":
        arrays["tokens/old"] = arrays["tokens/old"].astype(str)
    elif how == "score":
        about["rollouts"][0]["score"] = "high"
    elif how == "few":
        about["rollouts"] = about["rollouts"][1:]
    elif how == "pickle":
        arrays["answers"] = np.array([object()])
    elif how == "missing":
        del arrays["answers"]


@pytest.mark.parametrize("how", ["lengths", "negative", "type", "score", "few", "pickle", "missing", "half", "gone"])
def test_a_damaged_file_is_named(folder: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / ROLLOUTS / "00000001.npz"
    whole = path.read_bytes()
    try:
        if how == "gone":
            path.unlink()
        elif how == "half":
            path.write_bytes(whole[: len(whole) // 2])
        else:
            with np.load(BytesIO(whole)) as found:
                arrays = dict(found)
            about = json.loads(arrays["about"].tobytes())
            damaged(arrays, about, how)
            arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
            np.savez(path, **arrays)  # type: ignore[arg-type]
        assert main(["rollouts", "run"]) == 1
        said = capsys.readouterr().err
        assert "00000001.npz" in said and ("cannot be read" in said or how == "gone") and "Traceback" not in said
    finally:
        path.write_bytes(whole)
