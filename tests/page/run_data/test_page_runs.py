"""Runs as the page shows them: curves that keep extremes, events, logs, the stream of what is new, the report."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from browsing import Browser, make_run

from stoker.cli.main import main
from stoker.page.routes.run_stream import new_lines
from stoker.page.run_data.answer_views import evaluation_figures
from stoker.page.run_data.metric_series import MetricSeries, SeriesCache, json_numbers
from stoker.page.run_data.metric_tail import newest_lines
from stoker.page.run_data.report_answers import report_answers
from stoker.page.run_data.run_health import Health, _goodput, _learning
from stoker.page.run_data.run_view import RunViews
from stoker.runs.evaluations import Figure, KeptEvaluation
from stoker.runs.goodput import DESCRIPTIONS, Cause, Goodput
from stoker.runs.line_batches import LONGEST
from stoker.runs.run_folder import RunFolder

MANY = 200_000


def the_run(page: Browser) -> str:
    """The id of the only run."""
    (run,) = page.get("/api/runs").json()["runs"]
    return str(run["id"])


@pytest.fixture(scope="module")
def many_points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 200,000 steps with one spike, one dip and one line without a loss."""
    folder = make_run(tmp_path_factory.mktemp("many") / "runs" / "long")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, MANY + 1):
            loss: float | None = 2 + math.sin(step / 1000) / 10
            loss = {77_777: 99.0, 150_001: -7.0, 150_002: None}.get(step, loss)
            line = {"step": step, "loss": loss, "lr": 1e-3, "tokens": 10, "seconds": 0.5, "time": 100.0 + step}
            file.write(json.dumps(line) + "\n")
    return folder


def test_a_curve_of_many_points_keeps_its_extremes(many_points: Path) -> None:
    series = SeriesCache().of(many_points / "metrics.jsonl")
    curve = series.curve(["loss", "lr", "no such"], axis="step", begin=None, end=None, points=800)
    mean, least, most = curve.series["loss"]
    assert (curve.total, len(curve.x), list(curve.series)) == (MANY, 800, ["loss", "lr"])
    assert (float(np.nanmax(most)), float(np.nanmin(least))) == (99.0, -7.0)
    assert curve.x[int(np.nanargmax(most))] == pytest.approx(77_777, abs=MANY / 800)
    assert np.all(least <= mean + 1e-12) and np.all(mean <= most + 1e-12) and np.isfinite(mean).all()
    tight = series.curve(["loss"], axis="step", begin=77_770, end=77_790, points=800)
    assert (tight.total, tight.x.tolist()) == (21, list(range(77_770, 77_791)))
    assert tight.series["loss"][0][7] == 99.0


def test_the_axes_of_a_curve_are_sums(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", steps=4)
    series = SeriesCache().of(folder / "metrics.jsonl")
    for axis, expected in (("step", [1, 2, 3, 4]), ("tokens", [10, 20, 30, 40]), ("seconds", [1, 2, 3, 4])):
        curve = series.curve(["loss"], axis=axis, begin=None, end=None, points=10)  # type: ignore[arg-type]
        assert curve.x.tolist() == expected
        assert curve.series["loss"][0].tolist() == [1, 1 / 2, 1 / 3, 1 / 4]


def test_only_what_is_new_is_read_and_a_file_that_was_cut_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    series = MetricSeries(path)
    series.refresh()
    assert series.keys() == []
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "lo')
    series.refresh()
    assert (series.column("loss").tolist(), series.offset) == ([3], 23)
    with path.open("a") as file:
        file.write('ss": 2, "later": 5}\nno json\n[1]\n{"step": 3, "loss": null}\n')
    series.refresh()
    assert series.column("loss").tolist()[:2] == [3, 2] and math.isnan(series.column("loss")[2])
    assert math.isnan(series.column("later")[0]) and series.column("later")[1] == 5
    other = tmp_path / "other"
    other.write_text('{"step": 1, "loss": 9}\n')
    other.replace(path)  # as training does that goes back
    series.refresh()
    assert (series.column("loss").tolist(), series.keys()) == ([9], ["step", "loss"])


def test_metrics_that_are_no_file_are_said(page: Browser, tmp_path: Path) -> None:
    metrics = make_run(tmp_path / "runs" / "one") / "metrics.jsonl"
    metrics.unlink()
    os.mkfifo(metrics)
    page.page.runs.forget()
    assert [run["status"] for run in page.get("/api/runs").json()["runs"]] == ["unreadable"]
    found = page.get(f"/api/runs/{the_run(page)}").json()
    assert found["status"] == "unreadable"
    assert [each["key"] for each in found["health"] if each["level"] == "bad"] == ["health.metrics.unreadable"]


def test_a_line_that_is_too_long_is_skipped_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": "' + b"x" * (LONGEST * 16))
    series = MetricSeries(path)
    began = time.perf_counter()
    series.refresh()
    assert time.perf_counter() - began < 2  # 0.03 s; copied for every piece it took 6 s
    with path.open("a") as file:
        file.write('"}\n{"step": 2}\n')
    series.refresh()
    assert (series.column("step").tolist(), series.offset) == ([1, 2], path.stat().st_size)
    lines, offset = new_lines(path, 0)
    assert (lines, offset > LONGEST) == ([{"step": 1}], True)
    while offset < path.stat().st_size:
        lines, offset = new_lines(path, offset)
    assert lines == [{"step": 2}]


def test_a_run_is_shown_with_its_health(page: Browser, tmp_path: Path) -> None:
    audit = {"rows_in": 200, "rows_used": 199, "rows_cut": 3, "rows_dropped": 1, "tokens": 99}
    make_run(tmp_path / "runs" / "one", sources=[], audit=audit)
    page.page.runs.forget()
    run = the_run(page)
    found = page.get(f"/api/runs/{run}").json()
    assert (found["status"], found["step"], found["steps"], found["loss"]) == ("done", 5, 5, 0.2)
    levels = {each["what"]: each["level"] for each in found["health"]}
    assert levels == dict.fromkeys(("data", "memory", "speed", "goodput", "faults"), "ok")
    data = next(each["value"] for each in found["health"] if each["what"] == "data")
    assert data == {"rows": 200, "used": 199, "cut": 3, "dropped": 1, "tokens": 99}
    assert found["formats"] == ["adapter", "merged", "gguf"]
    assert (
        found["keys"]["task"] == "sft" and "task: sft" in found["job"] and found["command"].startswith("stoker train ")
    )


def test_values_of_a_jobs_keys_are_written_as_in_its_file(page: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    (folder / "job.yaml").write_text("task: sft\ntrain: {pack: true, lr: 2e-4}\ntarget:\ndata: a b.jsonl\n")
    page.page.runs.forget()
    found = page.get(f"/api/runs/{the_run(page)}").json()["keys"]
    assert found == {"task": "sft", "train.pack": "true", "train.lr": "0.0002", "target": "null", "data": "a b.jsonl"}


def test_a_list_reads_the_ends_of_files_alone(page: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one", steps=3000)
    page.page.runs.forget()
    [run] = page.get("/api/runs").json()["runs"]
    assert (run["step"], run["loss"]) == (3000, 1 / 3000)
    lines = newest_lines(folder / "metrics.jsonl", 7)
    assert [line["step"] for line in lines] == list(range(2994, 3001))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3001, "lo')
    assert newest_lines(folder / "metrics.jsonl", 1)[0]["step"] == 3000
    assert 0 < len(newest_lines(folder / "metrics.jsonl", 10**6)) < 3000
    (folder / "linked").symlink_to(folder / "metrics.jsonl")
    assert newest_lines(folder / "linked", 1) == newest_lines(folder / "nothing", 1) == []


def test_the_newest_checkpoint_on_disk_is_named(page: Browser, tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path / "runs" / "one"))
    page.page.runs.forget()
    assert page.get("/api/runs").json()["runs"][0]["saved"] is None
    for step, where in ((2, "disk"), (4, "disk"), (5, "memory")):
        folder.event("saved", step=step, where=where)
    assert page.get("/api/runs").json()["runs"][0]["saved"] == 4


def test_a_line_that_is_no_number_spoils_no_list(page: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    make_run(tmp_path / "runs" / "two")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": NaN, "loss": 1.0, "time": "x", "seconds": null}\n')
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "saved"}\n{"event": "fault", "time": "x"}\n')
    page.page.runs.forget()
    runs = page.get("/api/runs").json()["runs"]
    assert len(runs) == 2
    assert all(page.get(f"/api/runs/{run['id']}").status_code == 200 for run in runs)


def test_a_failure_and_too_much_memory_are_said(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path / "one"))
    plan = {"peak": 2**29, "upper": 2**29, "seconds": 1.0, "calibration": "2026-01-01", "corrected_by": None}
    others = {
        "layout": "",
        "micro_batch": 1,
        "accumulation": 1,
        "longest": 1,
        "mean": 1.0,
        "model": "",
        "precision": "",
    }
    others |= {"tuning": "", "device": "", "threads": 1, "machines": 1, "per_machine": 1, "memory": {}, "time": {}}
    folder.write_json(
        folder.plan, {"format": 1, "predicted": {**others, **plan, "seconds": 0.1}, "why_not": "", "measured": None}
    )
    folder.event("started", sources=[], audit={"rows_in": 100, "rows_used": 50, "rows_dropped": 50})
    folder.event("rolled_back")
    folder.event("failed", error="out of memory")
    levels = {each.what: each.level for each in RunViews(SeriesCache()).health(folder)}
    assert levels == {"data": "bad", "faults": "bad", "memory": "warn", "speed": "bad", "goodput": "ok"}


@pytest.mark.parametrize(
    ("lines", "level", "key", "steps"),
    [
        ([{"informative": 0.0, "grad_norm": 0.0}] * 6, "bad", "informative", 6),
        (
            [{"informative": 0.5, "grad_norm": 1.0}, *[{"informative": 0.0, "grad_norm": 0.1}] * 60],
            "warn",
            "informative",
            60,
        ),
        ([{"grad_norm": 0.0}] * 3, "warn", "grad_norm", 3),
        ([{"grad_norm": 0.0}, {"grad_norm": 1.0}], None, "", 0),
    ],
)
def test_steps_that_teach_nothing_are_said(
    tmp_path: Path, lines: list[dict[str, float]], level: str | None, key: str, steps: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step, line in enumerate(lines, 1)))
    found = _learning(SeriesCache().of(path))
    said = None if level is None else Health("learning", level, {"steps": steps}, f"health.learning.{key}")
    assert found == said


@pytest.mark.parametrize(
    ("cause", "seconds", "level"),
    [("start_up", 970, "ok"), ("evaluation", 970, "ok"), ("data", 200, "warn"), ("recovery", 970, "bad")],
)
def test_faults_and_waits_are_lost_and_the_start_is_not(cause: Cause, seconds: float, level: str) -> None:
    parts = {**dict.fromkeys(DESCRIPTIONS, 0.0), "productive": 1000 - seconds, cause: seconds}
    found = _goodput(Goodput(1000, parts))
    assert found is not None and (found.level, found.key) == (level, f"health.goodput.{level}")


def test_logs_are_read_from_where_one_was(page: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.log").write_text("first\n")
    (folder / "logs" / "rank-12.log").write_text("")
    page.page.runs.forget()
    path = f"/api/runs/{the_run(page)}/log?rank=0"
    line = "stoker logs runs/one --rank 0"
    assert page.get(path).json() == {"text": "first\n", "offset": 6, "ranks": [0, 12], "command": line}
    with (folder / "logs" / "rank-0.log").open("a") as file:
        file.write("second\n")
    assert page.get(f"{path}&offset=6").json()["text"] == "second\n"
    assert page.get(f"{path}&offset=-9").json()["text"] == "second\n"
    for rank, text in ((0, ""), (1, "at a line\n")):
        (folder / "logs" / f"stack-{rank}.txt").write_text(text)
    stacks = page.get(f"/api/runs/{the_run(page)}/stacks").json()["stacks"]
    assert stacks == [{"rank": 1, "text": "at a line\n"}]
    for rank in ("1", "-1", "x", "../../job.yaml", "0/../.."):
        assert page.get(f"/api/runs/{the_run(page)}/log?rank={rank}").status_code in (400, 404)


@pytest.mark.parametrize("points", ["0", "-1", "99999", "x", "1e3", "9" * 400])
def test_a_number_of_points_has_limits(page: Browser, tmp_path: Path, points: str) -> None:
    make_run(tmp_path / "runs" / "one")
    page.page.runs.forget()
    assert page.get(f"/api/runs/{the_run(page)}/metrics?points={points}").status_code == 400


def test_a_curve_whose_name_has_a_comma(page: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2, "reward/regex:a,b": 0.5}\n')
    page.page.runs.forget()
    query = {"key": ["reward/regex:a,b", "loss"]}
    found = page.get(f"/api/runs/{the_run(page)}/metrics", params=query).json()["series"]
    assert {key: curve["mean"] for key, curve in found.items()} == {"reward/regex:a,b": [0.5], "loss": [2]}
    too_many = page.get(f"/api/runs/{the_run(page)}/metrics", params={"key": ["loss"] * 65})
    assert (too_many.status_code, too_many.json()["error"]["message"]) == (400, "`key` is given 65 times")


def test_runs_behind_links_are_not_listed(page: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere" / "one")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs" / "two").mkdir()
    (tmp_path / "runs" / "two" / "events.jsonl").symlink_to(tmp_path / "elsewhere" / "one" / "events.jsonl")
    page.page.runs.forget()
    assert page.get("/api/runs").json()["runs"] == []


def test_evaluations_have_intervals(page: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    figure = {"of": "", "name": "exact", "value": 0.5, "standard_error": 0.1, "rows": 25, "low": 0.3, "high": 0.7}
    less = {
        "of": "less two",
        "name": "loss",
        "value": -0.2,
        "standard_error": None,
        "rows": 9,
        "low": -0.3,
        "high": -0.1,
    }
    common = {"version": 1, "time": 1.0, "model": "one", "step": 5, "data": {"path": "x"}, "asked": {}, "details": {}}
    (folder / "evaluations").mkdir()
    for kind, each in (("answers", figure), ("against", less)):
        text = json.dumps({**common, "kind": kind, "figures": [each]})
        (folder / "evaluations" / f"{kind}.json").write_text(text)
    several = [{**less, "rows": 10}, {**less, "rows": 10, "low": -0.1, "high": 0.3}]
    many = {**common, "kind": "against", "figures": several}
    (folder / "evaluations" / "many.json").write_text(json.dumps(many))
    page.page.runs.forget()
    every = page.get(f"/api/runs/{the_run(page)}/evaluations").json()["evaluations"]
    by_rows = [(each["rows"], each["significant"]) for each in every if each["kind"] == "against"]
    assert by_rows == [(9, False), (10, True), (10, False)]  # fewer than 10 rows say nothing
    found = {each["kind"]: each for each in reversed(every)}
    assert (found["answers"]["low"], found["answers"]["high"]) == (0.3, 0.7)
    assert (found["answers"]["subject"], found["against"]["subject"], found["against"]["of"]) == ("one", "one", "")
    assert (found["against"]["against"], found["against"]["higher"], found["against"]["low"]) == ("two", False, -0.3)


def test_a_comparison_names_the_run_of_each_figure() -> None:
    def figure(of: str, low: float | None = None, high: float | None = None) -> Figure:
        return Figure(of, "exact", 0.5, rows=10, low=low, high=high)

    figures = (figure("one"), figure("two", 0.0, 0.9), figure("less two", 0.1, 0.3))
    found = list(evaluation_figures([KeptEvaluation("against", 1.0, "one", 5, {"path": "x"}, {}, figures)]))
    assert [each["subject"] for each in found] == ["one", "two", "one"]
    assert [each["against"] for each in found] == [None, None, "two"]
    assert [each["significant"] for each in found] == [False, False, True]
    assert all(each["higher"] for each in found)


def test_a_report_holds_runs_and_no_path_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    (folder / "environment.json").write_text(json.dumps({"command": [f"{tmp_path}/stoker", "train"], "git": "abc"}))
    two = make_run(tmp_path / "runs" / "two")
    (two / "job.yaml").write_text(f"data: {tmp_path}/rows.jsonl\nmodel: org/name\noutput: https://host/a/b\n")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "one", "runs/two", "one", "-o", "all.html"]) == 0
    assert capsys.readouterr().out.startswith("all.html: 2 runs, ")
    text = (tmp_path / "all.html").read_text()
    assert str(tmp_path) not in text
    inside = json.loads(text.partition('id="report">')[2].partition("</script>")[0])
    assert "data: rows.jsonl\\nmodel: org/name\\noutput: https://host/a/b" in text
    assert [run["name"] for run in inside["answers"]["/api/runs"]["runs"]] == ["one", "two"]
    key = inside["answers"]["/api/runs"]["runs"][0]["id"]
    assert inside["answers"][f"/api/runs/{key}/metrics"]["series"]["loss"]["min"][-1] == 0.2
    assert main(["report", "one", "-o", "job.yaml"]) == 2
    assert main(["report", "one", "-o", "all.html/more.html"]) == 2
    assert main(["report", "one", "-o", "no-folder/all.html"]) == 2
    assert main(["report", "three"]) == 2
    assert "three" in capsys.readouterr().err


def test_passwords_of_addresses_are_shown_nowhere(page: Browser, tmp_path: Path) -> None:
    store, web = "redis://me:word-hush@host:6379/0", "https://name-hush@host/a?sig=hush&part=2&X-Amz-Signature=hush"
    folder = make_run(tmp_path / "runs" / "one", model=web, sources=[{"path": store}])
    (folder / "job.yaml").write_text(f"task: ranking\nexport: {{sync: {{to: '{store}'}}}}\ndata: {web}\n")
    samples = [{"prompt": f"{tmp_path}/private", "answer": store}]
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 106.0, "event": "sampled", "step": 5, "samples": samples}) + "\n")
    (folder / "environment.json").write_text(json.dumps({"command": ["stoker", "train", f"data={web}"]}))
    page.page.runs.forget()
    key = the_run(page)
    for path in ("/api/runs", f"/api/runs/{key}", f"/api/runs/{key}/events"):
        assert "hush" not in page.get(path).text, path
    job = page.get(f"/api/runs/{key}").json()["job"]
    assert "redis://me:***@host:6379/0" in job and "https://***@host/a?sig=***&part=2&X-Amz-Signature=***" in job
    report = json.dumps(report_answers([RunFolder(folder)]))
    assert "hush" not in report and str(tmp_path) not in report


def test_recipes_and_keys_are_those_of_the_schema(make_page: Callable[..., Browser]) -> None:
    page = make_page()
    names = [each["name"] for each in page.get("/api/recipes").json()["recipes"]]
    assert names[0] == "sft-lora" and page.get(f"/api/recipes/{names[-1]}").json()["yaml"]
    assert page.get("/api/recipes/..%2fsft").status_code == 404
    stages = page.get("/api/recipes/rlhf").json()["stages"]
    assert [each["task"] for each in stages] == ["sft", "reward", "ppo"] and not page.get("/api/recipes/dpo").json()[
        "stages"
    ]
    keys = {each["path"]: each for each in page.get("/api/schema?task=sft").json()["keys"]}
    assert keys["train.lr"]["meaning"] and keys["train.optimizer"]["reason"] and not keys["train.lr"]["advanced"]
    assert keys["data.path"]["required"] and "adamw" in keys["train.optimizer"]["choices"]
    assert keys["train.optimizer"]["only_choices"] and not keys["tune.targets"]["only_choices"]
    assert keys["train.compile"]["choices"] == ["true", "false", "auto"] and keys["train.compile"]["only_choices"]
    assert "evaluate.data" in keys and not any(path.startswith("ppo") for path in keys)
    assert page.get("/api/schema?task=nope").status_code == 404


def test_numbers_have_seven_digits() -> None:
    random = np.random.default_rng(1)
    values = random.standard_normal(3000) * 10.0 ** random.integers(-30, 30, 3000)
    whole = np.concatenate([values, [0.0, 1.0, 123456789.0, 0.1, 5e-324, 1.7e308, 1e22, 99999995.0, np.nan, np.inf]])
    expected = [float(f"{value:.7g}") if np.isfinite(value) else None for value in whole.tolist()]
    for found, value in zip(json_numbers(whole), expected, strict=True):
        assert found == value or (value is not None and found == pytest.approx(value, rel=2e-7)), value
    assert sum(map(len, map(str, json_numbers(values)))) < 1.01 * sum(map(len, map(str, expected[:3000])))
    assert json_numbers(whole[:0]) == []
