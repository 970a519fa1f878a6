"""``stoker eval --answers`` as a user calls it, on tiny runs; what it keeps; what ``stoker runs`` shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from evaluation_rows import QUESTIONS, write_lines

from stoker.cli.eval import answers as eval_answers
from stoker.cli.main import main
from stoker.runs.evaluations import read_evaluations


def figures(content: dict[str, list[dict[str, object]]]) -> dict[object, object]:
    return {figure["name"]: figure["value"] for figure in content["figures"]}


@pytest.mark.slow
def test_a_run_that_knows_the_answers_is_right(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["eval", "good", "--answers", "asked.jsonl", "--score", "exact", "chrf", "--max-tokens", "20", "--json"])
        == 0
    )
    good = json.loads(capsys.readouterr().out)
    assert figures(good) == {"exact": 1.0, "chrf": 1.0}
    assert good["figures"][0]["rows"] == 12 and good["figures"][0]["standard_error"] == 0
    assert good["step"] == 40 and good["data"]["rows"] == 12
    kept = Path(good["kept"])
    assert kept.parent == here / "runs" / "good" / "evaluations"
    written = json.loads(kept.read_text())
    assert written == {key: value for key, value in good.items() if key != "kept"}
    rows = [json.loads(line) for line in kept.with_suffix(".jsonl").read_text().splitlines()]
    assert [(r["prompt"][0]["content"], r["answer"]) for r in rows] == QUESTIONS * 4
    assert all(r["scores"] == {"exact": 1.0, "chrf": 1.0} and r["finish"] == "stop" for r in rows)


def test_a_file_that_was_trained_on_is_named(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((here / "rows.jsonl").read_bytes())
    answers = ["--limit", "1", "--max-tokens", "1", "--to", str(tmp_path), "--answers"]
    assert main(["eval", "bad", str(copy)]) == 0
    assert "trained on: copy.jsonl; only rows that the run held out" in capsys.readouterr().out
    cases = ([str(copy)], True), ([str(tmp_path / "c*.jsonl")], True), ([*answers, str(copy)], True)
    for words, trained in (*cases, ([*answers, "asked.jsonl"], False)):
        assert main(["eval", "bad", *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found.get("details", found).get("trained_files") == ["copy.jsonl"]) is trained


def test_rows_without_an_expected_answer_are_counted_and_said(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question, answer = QUESTIONS[0]
    asked = [
        {"question": question, "answer": answer},
        {"prompt": question},
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]},
        {"prompt": question, "expected": "well", "scorer": "regex"},
    ]
    path = write_lines(tmp_path / "asked.jsonl", asked)
    words = ["eval", "good", "--answers", str(path), "--score", "exact", "regex:am", "--max-tokens", "20"]
    assert main([*words, "--to", str(tmp_path / "there"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["details"]["rows_without_expected"] == 1
    assert {f["name"]: f["rows"] for f in found["figures"]} == {"exact": 2, "regex:am": 3, "regex": 1}
    assert Path(found["kept"]).parent == tmp_path / "there" / "evaluations"
    assert main([*words, "--to", str(tmp_path / "there")]) == 0
    assert "1 of them have no expected answer" in capsys.readouterr().out


def test_the_number_of_answers_is_printed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "good", "--answers", "asked.jsonl", "--limit", "2", "--max-tokens", "2", "--json"]
    assert main(words) == 0
    assert "answered 1 of" not in (err := capsys.readouterr().err) and "answered 2 of 2 rows; scoring ..." in err
    monkeypatch.setattr(eval_answers, "EVERY", 0)
    assert main([*words, "--against", "bad"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "answered" in line]
    assert lines == [
        f"{name}: answered {count}"
        for name in ("good", "bad")
        for count in ("1 of 2 rows ...", "2 of 2 rows; scoring ...")
    ]


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet", "jsonl.gz"])
def test_rows_come_from_every_kind_of_file(
    suffix: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": q, "expected": a} for q, a in QUESTIONS]
    path = tmp_path / f"asked.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(rows))
    elif suffix == "csv":
        path.write_text("prompt,expected\n" + "".join(f'"{q}","{a}"\n' for q, a in QUESTIONS))
    elif suffix == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        import gzip

        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    words = ["--score", "exact", "--max-tokens", "20", "--limit", "2", "--to", str(tmp_path), "--json"]
    assert main(["eval", "good", "--answers", str(path), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert figures(found) == {"exact": 1.0} and found["data"]["rows"] == 2


def test_a_model_that_is_no_run_is_measured_and_nothing_is_kept(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.rglob("*"))
    words = ["eval", "tiny", "--answers", "asked.jsonl", "--limit", "2", "--max-tokens", "4"]
    assert main(words) == 0
    assert "results are not saved: tiny is not a run; give a folder with --to FOLDER" in capsys.readouterr().out
    assert sorted(here.rglob("*")) == before
    assert (
        main(["eval", "tiny", "--answers", "asked.jsonl", "--limit", "2", "--max-tokens", "4", "--to", str(tmp_path)])
        == 0
    )
    assert len(read_evaluations(tmp_path)) == 1


def test_a_mistyped_run_is_not_looked_for_on_the_hub(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/goo", "--answers", "asked.jsonl"]) == 2
    assert "there is no run runs/goo; did you mean runs/good?" in capsys.readouterr().err


def test_the_loss_of_a_models_folder_is_that_of_its_run(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for folder, message in (("tiny", "tiny is the folder of a model"), (str(tmp_path), "is an exported adapter")):
        assert main(["eval", folder, "asked.jsonl"]) == 2
        error = capsys.readouterr().err
        assert message in error and "give its run" in error


@pytest.mark.parametrize("option", ["--limit", "--max-tokens"])
def test_a_number_that_is_too_small_is_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "good", "--answers", "asked.jsonl", option, "0"]) == 2
    assert f"error: {option} must be above 0\n" in capsys.readouterr().err


def test_draws_are_a_function_of_the_seed(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for seed in ("1", "1", "2"):
        words = ["--temperature", "2", "--seed", seed, "--max-tokens", "8", "--to", str(tmp_path), "--json"]
        assert main(["eval", "bad", "--answers", "asked.jsonl", *words]) == 0
        kept = Path(json.loads(capsys.readouterr().out)["kept"]).with_suffix(".jsonl")
        answers.append([json.loads(line)["answer"] for line in kept.read_text().splitlines()])
    assert answers[0] == answers[1] != answers[2]
    assert answers[0][0] != answers[0][3]  # the same prompt in another row is another draw


def test_runs_shows_what_was_measured(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "good", "--answers", "asked.jsonl", "--score", "chrf", "--max-tokens", "20"]) == 0
    capsys.readouterr()
    assert main(["runs", "good"]) == 0
    printed = capsys.readouterr().out
    assert "asked.jsonl" in printed and "chrf" in printed
    assert main(["runs", "good", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert figures(run["evaluations"][-1]) == {"chrf": 1.0}


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}', '{"version": 2, "kind": "answers"}', "[" * 100_000])
def test_evaluations_that_are_none_are_left_out(content: str, tmp_path: Path) -> None:
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "x.json").write_text(content)
    (tmp_path / "evaluations" / "link.json").symlink_to(tmp_path / "evaluations" / "x.json")
    assert read_evaluations(tmp_path) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "How?"}\n{"prompt": ', "asked.jsonl:2: not valid JSON"),
        ('{"prompt": "How?"}\n{"answer": "x"}', "asked.jsonl:2: the row has no prompt"),
        ('{"prompt": 3, "scorer": 4}', "asked.jsonl:1: scorer is not the name"),
        ('{"prompt": "How?", "expected": "x", "scorer": "exakt"}', "asked.jsonl:1: there is no scorer 'exakt'"),
        ('{"prompt": "How?", "expected": "x", "scorer": "numeric"}', "asked.jsonl:1: .* contains no number"),
        ('{"prompt": "How?", "expected": "(", "scorer": "regex"}', "asked.jsonl:1: .* not a regular expression"),
        ('{"prompt": "%s"}' % ("x y " * 200), "asked.jsonl:1: the prompt is [0-9,]+ tokens"),
        ('{"prompt": [1, 2]}', "asked.jsonl:1: prompt is neither text nor messages"),
        ("", "asked.jsonl is empty"),
        ("\n\n", "asked.jsonl is empty"),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(
    lines: str, message: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(lines)
    assert main(["eval", "bad", "--answers", str(path), "--to", str(tmp_path / "there")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--answers", "none.jsonl"], "none.jsonl"),
        (["--answers", "asked.jsonl", "--compare"], "measure a loss"),
        (["rows.jsonl", "--answers", "asked.jsonl"], "give one of them"),
        (["--score", "exact"], "--answers FILE"),
        (["--limit", "3"], "--answers FILE"),
        (["--temperature", "1"], "no effect on a loss"),
        (["--answers", "asked.jsonl", "--limit", "0"], "above 0"),
        (["--answers", "asked.jsonl", "--temperature", "-1"], "at least 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "bad", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_link_in_the_place_of_the_folder_is_not_followed(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "evaluations").symlink_to(tmp_path / "elsewhere")
    words = ["eval", "bad", "--answers", "asked.jsonl", "--limit", "1", "--max-tokens", "2", "--to", str(tmp_path)]
    assert main(words) == 1
    assert "is a link" in capsys.readouterr().err and not list((tmp_path / "elsewhere").iterdir())
