"""Two runs on the same rows: the planted better one wins, equal ones tie, and the losses are those that eval gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from evaluation_rows import QUESTIONS, write_lines

from stoker.cli.main import main
from stoker.page.run_data.answer_views import evaluation_figures
from stoker.runs.evaluations import read_evaluations
from stoker.scoring.judge import Judge


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["eval", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_run_that_knows_the_answers_wins(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--answers", "asked.jsonl", "--score", "exact", "--max-tokens", "20"]
    found = evaluated(capsys, "good", "--against", "bad", *words)
    good, bad, difference = found["figures"]
    assert (good["of"], bad["of"], difference["of"]) == ("good", "bad", "less bad")
    assert (good["value"], bad["value"], difference["value"]) == (1, 0, 1)
    assert 0.5 < difference["low"] < difference["high"] == 1
    assert found["details"]["exact"] == {"wins": 12, "losses": 0, "ties": 0, "most_different": [0, 1, 2, 3, 4]}
    rows = [json.loads(line) for line in Path(found["kept"]).with_suffix(".jsonl").read_text().splitlines()]
    assert rows[0]["answer"] == QUESTIONS[0][1] != rows[0]["against"]["answer"]
    assert main(["eval", "good", "--against", "bad", *words]) == 0
    assert "good wins 12 rows, loses 0, ties 0" in capsys.readouterr().out


def test_a_judge_compares_the_answers_of_two_runs(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str]] = []

    def knows(_: Judge, question: str, a: str, b: str) -> str:
        asked.append((a, b))
        right = dict(QUESTIONS)[question.removeprefix("user: ")]
        return "A" if a == right else "B" if b == right else "TIE"

    monkeypatch.setattr(Judge, "_ask", knows)
    rows = write_lines(tmp_path / "asked.jsonl", [{"prompt": q} for q, _ in QUESTIONS])  # no expected answers
    name = "judge:http://127.0.0.1:1/v1,mine"
    words = ["--answers", str(rows), "--score", name, "--max-tokens", "20"]
    count = len(QUESTIONS)
    found = evaluated(capsys, "good", "--against", "bad", *words)
    assert [figure["value"] for figure in found["figures"]] == [1, 0, 1]
    assert found["details"][name]["wins"] == count and found["details"]["judge"]["win"] == count
    assert len(asked) == 2 * count and asked[0] == asked[1][::-1]
    found = evaluated(capsys, "bad", "--against", "good", *words)
    assert [figure["value"] for figure in found["figures"]] == [0, 1, -1]
    asked.clear()
    found = evaluated(capsys, "good", "--against", "good", *words)
    assert found["details"][name]["ties"] == count and not asked
    monkeypatch.setattr(Judge, "_ask", lambda *_: None)
    assert main(["eval", "good", "--against", "bad", *words]) == 0
    assert f"0 tie, 0 contradictory, {count} unclear, which no figure counts" in capsys.readouterr().out
    monkeypatch.setattr(Judge, "_ask", lambda *given: None if given[1].endswith(QUESTIONS[0][0]) else knows(*given))
    found = evaluated(capsys, "good", "--against", "bad", *words)
    assert [(figure["value"], figure["rows"]) for figure in found["figures"]] == [
        (1, count - 1),
        (0, count - 1),
        (1, count - 1),
    ]
    assert found["details"]["judge"] | {"win": count - 1, "unclear": 1} == found["details"]["judge"]
    assert found["details"]["rows_without_score"] == 1
    rows = [json.loads(line) for line in Path(found["kept"]).with_suffix(".jsonl").read_text().splitlines()]
    assert (rows[0]["scores"][name], rows[0]["why"][name]) == (None, "unclear")


def test_two_checkpoints_of_a_run_are_compared_by_their_steps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["good", "--against", "good", "--against-at", "32", "--answers", "asked.jsonl", "--score", "chrf"]
    found = evaluated(capsys, *words)
    assert [figure["of"] for figure in found["figures"]] == ["good step 40", "good step 32", "less good step 32"]
    words[2] = "runs/good"
    assert evaluated(capsys, *words)["figures"] == found["figures"]
    assert found["asked"]["against_at"] == "32"
    assert main(["eval", "good", "--against-at", "32"]) == 2
    assert "--against-at is a checkpoint of --against" in capsys.readouterr().err


def test_runs_of_one_name_are_told_apart_by_their_folders(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for chain in ("first", "second"):
        shutil.copytree(here / "runs" / "good", tmp_path / chain / "sft")
    words = ["--answers", "asked.jsonl", "--score", "chrf", "--limit", "1"]
    for more in (words, ["rows.jsonl"]):
        found = evaluated(capsys, str(tmp_path / "first/sft"), *more, "--against", str(tmp_path / "second/sft"))
        assert [figure["of"] for figure in found["figures"]] == ["first/sft", "second/sft", "less second/sft"]
        assert found["model"] == "first/sft"
    [*_, difference] = evaluation_figures(read_evaluations(tmp_path / "first/sft"))
    assert (difference["run"], difference["against"]) == ("first/sft", "second/sft")


def test_a_run_against_itself_ties(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(capsys, "bad", "--against", "bad", "--answers", "asked.jsonl", "--score", "chrf")
    assert found["details"]["chrf"]["ties"] == 12 and found["figures"][-1]["value"] == 0
    assert main(["eval", "bad", "rows.jsonl", "--against", "bad"]) == 0
    assert "the difference is not significant" in capsys.readouterr().out


def test_losses_of_rows_add_up_to_those_of_eval(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_lines(
        tmp_path / "rows.jsonl", [{"prompt": f"{q} {i}", "completion": a} for i in range(4) for q, a in QUESTIONS]
    )
    alone = {name: evaluated(capsys, name, str(rows))["loss"] for name in ("good", "bad")}
    found = evaluated(capsys, "good", str(rows), "--against", "bad")
    good, bad, difference = found["figures"]
    assert good["value"] == pytest.approx(alone["good"], rel=1e-5)
    assert bad["value"] == pytest.approx(alone["bad"], rel=1e-5)
    assert difference["value"] == pytest.approx(alone["good"] - alone["bad"], rel=1e-4)
    assert difference["low"] <= difference["value"] <= difference["high"] < 0
    assert found["details"]["loss"]["wins"] == 12  # a lower loss wins
    kept = [json.loads(line) for line in Path(found["kept"]).with_suffix(".jsonl").read_text().splitlines()]
    assert [row["row"] for row in sorted(kept, key=lambda row: row["row"])] == list(range(1, 13))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "none"], "there is no run none"),
        (["--against", "runs/ba"], "there is no run runs/ba; did you mean runs/bad?"),
        (["--against", "bad", "--tasks", "offline"], "run --tasks on each"),
        (["--against", "bad", "--compare"], "neither --compare"),
        (["--against", "bad"], "held no rows out"),
        (["nothing.jsonl", "--against", "bad"], "nothing.jsonl"),
    ],
)
def test_what_cannot_be_compared_is_one_clear_error(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "good", *words]) == 2
    assert message in capsys.readouterr().err


def test_runs_with_different_templates_are_not_compared_on_held_out_rows(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "rows.jsonl", [{"prompt": q, "completion": a} for _ in range(4) for q, a in QUESTIONS])
    turns = "{% for m in messages %}MARK{{ m.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "second.jinja").write_text(turns.replace("MARK", "-"))
    (tmp_path / "other.jinja").write_text(turns.replace("MARK", "+"))
    for name, template in (("first", "other"), ("second", "second"), ("third", "other")):
        (tmp_path / f"{name}.yaml").write_text(
            f"task: sft\nmodel: {base / 'tiny'}\ndata: [{{path: rows.jsonl, template: {template}.jinja}}]\n"
            "tune: full\ntrain: {batch: 4, seq_len: 64}\nsteps: 1\nevaluate: {fraction: 0.3}\n"
        )
        assert main(["train", f"{name}.yaml"]) == 0
    assert main(["eval", "first", "--against", "second"]) == 2
    assert "the two runs have different tokenizers or templates" in capsys.readouterr().err
    found = evaluated(capsys, "first", "--against", "third")
    assert found["details"]["loss"]["ties"] > 0
