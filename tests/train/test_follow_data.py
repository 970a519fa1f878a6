"""A progressive run whose log grows: it goes on with the new rows, and is the run that has had them all."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import pytest
import torch
from click_logs import ranking_job, write_clicks
from running import run, write_job

from stoker.cli.commands import train
from stoker.cli.main import main
from stoker.cli.train import follow_data
from stoker.data.ranking import click_log
from stoker.data.ranking.click_log import ClickLog, open_log
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.data.sources import open_source
from stoker.errors import UserError
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.load_job import load_job
from stoker.node_cache.object_cache import RemoteObject
from stoker.node_cache.object_version import ObjectVersion
from stoker.node_cache.remote_file import RemoteFile
from stoker.runs.step_metrics import StepMetrics
from stoker.train.display import Display
from stoker.train.ranking.progressive import read_periods

DAYS = ("day_1.jsonl", "day_2.jsonl", "day_10.jsonl")


@pytest.fixture
def days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of three files in order of time, the third of which is elsewhere."""
    rows = [json.loads(line) for line in write_clicks(tmp_path / "all.jsonl").read_text().splitlines()]
    lines = [
        json.dumps({**row, "timestamp": 1_500_000_000 + 86_400 * (n // 80) + n}) + "\n" for n, row in enumerate(rows)
    ]
    (tmp_path / "log").mkdir()
    for number, name in enumerate(DAYS):
        (tmp_path / "log" / name).write_text("".join(lines[80 * number : 80 * (number + 1)]))
    (tmp_path / "log" / DAYS[2]).rename(tmp_path / DAYS[2])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def growing(**changes: Any) -> dict[str, Any]:
    job = ranking_job(ranking={"progressive": True}, data="log/*.jsonl", **changes)
    del job["steps"]
    train = {**job["train"], "schedule": "constant", "batch": 10}
    return {**job, "epochs": 1, "train": train, "evaluate": {"fraction": 0.0}}


def test_a_run_goes_on_with_new_rows(days: Path) -> None:
    first = run(days, growing(output="grown"))
    assert first.outcome.step == 16
    shutil.copy(days / DAYS[2], days / "log" / DAYS[2])
    grown = run(days, growing(output="grown"))
    whole = run(days, growing(output="whole"))
    assert grown.outcome.step == whole.outcome.step == 24
    assert [line["step"] for line in grown.folder.read_metrics()] == list(range(1, 25))
    assert grown.losses == whole.losses
    weights = [ran.prepared.task.model.state_dict() for ran in (grown, whole)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert grown.prepared.task.tables.rows == whole.prepared.task.tables.rows
    for one, other in zip(grown.prepared.task.tables.parts(), whole.prepared.task.tables.parts(), strict=True):
        for name, table in one.tables.items():
            assert torch.equal(table.values, other.tables[name].values)


def test_a_day_in_several_files_is_evaluated_file_by_file_whenever_they_come(days: Path) -> None:
    parts = (days / "log" / DAYS[1]).read_text().splitlines(keepends=True)
    first = (days / "log" / DAYS[0]).read_text().splitlines(keepends=True)
    hours = [first[:40], first[40:], parts[:30], parts[30:]]
    for path in (days / "log").iterdir():
        path.unlink()
    for number, lines in enumerate(hours):
        (days / "log" / f"hour_{number}.jsonl").write_text("".join(lines))
        run(days, growing(output="grown"))
    grown, whole = run(days, growing(output="grown")), run(days, growing(output="whole"))
    assert [(p["first"], p["rows"]) for p in read_periods(grown.folder.path)] == [(40, 40), (80, 30), (110, 50)]
    assert read_periods(grown.folder.path) == read_periods(whole.folder.path)
    assert grown.losses == whole.losses


@pytest.mark.parametrize("times", ["none", "not since 1970", "days, and rows held out"])
def test_what_is_known_of_the_first_file_stays_when_others_come(times: str, tmp_path: Path) -> None:
    def opened() -> ClickLog:
        fraction = 0.25 if "held out" in times else 0.0
        block = SourceBlock(path="log/*.jsonl")
        return open_log([block], RankingBlock(), tmp_path, held_out=[], fraction=fraction, progressive=True)

    (tmp_path / "log").mkdir()
    rows = [{"label": n % 2, "price": float(n % 9) + n / 7, "empty": ""} for n in range(40)]
    later = [{"label": n % 2, "price": 1e6 * n, "empty": "b", "new": "a"} for n in range(40)]
    for number, day in enumerate((rows, later)):
        start = 1_500_000_000 if "days" in times else 0
        stamps = [{"ts": start + 86_400 * number + n} if times != "none" else {} for n in range(40)]
        lines = [json.dumps({**row, **stamp}) + "\n" for row, stamp in zip(day, stamps, strict=True)]
        (tmp_path / "log" / f"day_{number}.jsonl").write_text("".join(lines))
        if number == 0:
            before = opened()
    after = opened()
    assert after.features == before.features
    assert [column.name for column in after.features.columns] == ["price", "empty"]
    assert after.training.store.summary.unknown == {"new": 40}
    assert after.training.first_rows().tolist() == [0, 40]
    assert before.fingerprints.items() <= after.fingerprints.items()


@pytest.mark.parametrize(
    ("named", "grows"),
    [
        ("log.jsonl", False),
        ("org/log", False),
        ("URL?sig=a%2Fb", False),
        ("*.jsonl", True),
        (".", True),
        ("URL*", True),
    ],
)
def test_only_a_folder_or_a_pattern_grows(
    named: str, grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps({"label": n % 2, "price": n / 7}) + "\n" for n in range(40)))
    source = open_source(SourceBlock(path="log.jsonl"), tmp_path)
    if "URL" in named:
        url = "https://host/log.jsonl?sig=a%2Fb"
        named = named.replace("URL?sig=a%2Fb", url).replace("URL", "https://host/log")
        source = replace(source, files=(RemoteFile(RemoteObject(url, ObjectVersion(None))),))
    elif named == "org/log":
        monkeypatch.setattr(click_log, "open_source", lambda block, base: source)
    opened = [SourceBlock(path=named)], [(source, "auto")]
    assert click_log._names_a_file(*opened, tmp_path) != grows
    if "://" not in named:
        log = open_log(opened[0], RankingBlock(), tmp_path, held_out=[], fraction=0.0, progressive=True)
        assert log.training.first_rows().tolist() == ([0] if grows else [*range(0, 40, 4)])


def test_a_slice_has_the_features_of_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for number, row in enumerate([{"price": 1.5}, {"price": 2.5, "user": "a"}]):
        rows = [{"label": n % 2, **row} for n in range(20)]
        (tmp_path / "log" / f"day_{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, found in (("[:30]", "user"), ("", None)):
        data = [SourceBlock(path="log/*.jsonl", split=split)]
        settings = RankingBlock(group="user") if found else RankingBlock()
        log = open_log(data, settings, tmp_path, held_out=[], fraction=0.0, progressive=True)
        assert log.features.group == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("earlier rows", "day_10.jsonl: rows are earlier .* end at 2017-07-15 02:42:39: 80, as row 1 at 2017-07-14"),
        ("another first file", "day_1.jsonl of .* has changed since the run trained on it; restore it"),
        ("a file in between", "day_1b.jsonl of .* comes before files that the run has trained on; rename it"),
        ("a removed file", "day_1.jsonl of .* was removed, which the run has trained on; put it back"),
        ("another column", "day_10.jsonl have no column 'user_id', which the model is trained on; add it"),
    ],
)
def test_a_log_that_changed_otherwise_is_refused(change: str, said: str, days: Path) -> None:
    run(days, growing())
    new = (days / DAYS[2]).read_text().splitlines(keepends=True)
    if change == "earlier rows":
        rows = [{**json.loads(line), "timestamp": 1_500_000_100} for line in new]
        (days / "log" / DAYS[2]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif change == "another first file":
        (days / "log" / DAYS[0]).write_text("".join(new))
    elif change == "a removed file":
        (days / "log" / DAYS[0]).unlink()
    elif change == "another column":
        (days / "log" / DAYS[2]).write_text("".join(new).replace("user_id", "uid"))
    else:
        (days / "log" / "day_1b.jsonl").write_text("".join(new))
    with pytest.raises(UserError, match=said):
        run(days, growing())


def test_a_file_without_a_column_is_named_at_the_first_start(days: Path) -> None:
    (days / "log" / DAYS[1]).write_text((days / "log" / DAYS[1]).read_text().replace("user_id", "uid"))
    said = "column user_id is not in day_2.jsonl: 80 rows have no value of it"
    assert said in run(days, growing()).prepared.facts["warnings"]


def test_follow_trains_on_what_comes(
    days: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_job(days, growing(output="followed"))
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        """Between two looks: half of the new file comes, then the rest, then nothing until the person ends it."""
        looks.append(seconds)
        new = (days / DAYS[2]).read_text()
        if len(looks) == 1:
            (days / "log" / DAYS[2]).write_text(new[: len(new) // 2])
        elif len(looks) == 2:
            (days / "log" / DAYS[2]).write_text(new)
        elif len(looks) == 6:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(train, "wait_for_more", partial(follow_data.wait_for_more, pause=sleep))
    assert main(["train", "job.yaml", "--follow", "7", "--json"]) == 143
    said = capfd.readouterr()
    assert [json.loads(line)["step"] for line in said.out.splitlines()] == [16, 24]
    assert set(looks) == {7.0} and said.err.count("waiting for more rows, checking every 7 s") == 2
    whole = run(days, growing(output="whole"))
    lines = [json.loads(line) for line in (days / "followed/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == whole.losses


def test_a_file_without_a_final_newline_is_waited_for(days: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_job(write_job(days, growing()))
    known, file, looks = follow_data.contents_of(loaded, days), days / "log" / DAYS[2], 0

    def pause(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            file.write_text('{"clicked":')
        elif looks == 5:
            shutil.copy(days / DAYS[2], file)

    follow_data.wait_for_more(loaded, days, known, 1, pause)
    assert looks == 7 and capfd.readouterr().err.count("day_10.jsonl does not end with a newline") == 1
    file.write_text('{"clicked": 1}')
    os.utime(file, (0, time() - 2 * follow_data.SETTLED))
    assert not follow_data.wait_until_complete(loaded, days, 1, pause)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_the_last_step_ends_a_followed_run(
    number: int, code: int, days: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def wait(*_: Any) -> None:
        """First an empty file comes; then one in whose last step a signal comes."""
        if not (days / "log/empty.jsonl").exists():
            (days / "log/empty.jsonl").touch()
            return
        shutil.copy(days / DAYS[2], days / "log" / DAYS[2])
        step = Display.step

        def last(self: Display, metrics: StepMetrics) -> None:
            step(self, metrics)
            if metrics.step == 24:
                signal.raise_signal(number)

        monkeypatch.setattr(Display, "step", last)

    write_job(days, growing(output="followed"))
    monkeypatch.setattr(train, "wait_for_more", wait)
    assert main(["train", "job.yaml", "--follow", "7"]) == code
    said = capfd.readouterr().out
    assert said.count("done: followed") == said.count("next:") == 1
    assert said.count("trained on all rows up to step 16, loss") == 1 and "raise `steps`" not in said
    assert "this run is done: 16 steps. It continues when the data has further rows" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((("--follow", s), f"--follow {s}: not a valid number of seconds") for s in ("0", "-1", "nan", "inf")),
        (("--follow", "5", "ranking.progressive=false"), "--follow needs a growing log"),
        (("--follow", "5", "steps=3", "epochs=null"), "`steps` limits the run; write `epochs: 1`"),
    ],
)
def test_what_cannot_be_followed(
    words: tuple[str, ...], said: str, days: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(days, growing())
    assert main(["train", "job.yaml", *words]) == 2
    assert said in capsys.readouterr().err and not (days / "run").exists()
