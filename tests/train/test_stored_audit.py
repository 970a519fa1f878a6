"""The audit before training is made once for all processes, and is the one that `stoker data` shows."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running import write_job, write_rows

from stoker.cli.main import main
from stoker.data import stored_audit as room
from stoker.data.audit import Audit, audit
from stoker.data.corpus import open_corpus
from stoker.data.stored_audit import audited
from stoker.data.text_codec import TextCodec
from stoker.errors import UserError
from stoker.job.load_job import LoadedJob, load_job
from stoker.launch.data_gate import check_data
from stoker.launch.run_spec import RunSpec
from stoker.train.prepare import prepare

JOB: dict[str, Any] = {"task": "sft", "model": "llama-3m", "data": "my.jsonl", "steps": 4, "output": "run"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each audit that was computed."""
    made: list[str] = []

    def counted(*arguments: Any) -> Audit:
        made.append("audit")
        return audit(*arguments)

    monkeypatch.setattr(room, "audit", counted)
    return made


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    write_rows(tmp_path / "my.jsonl", 40)
    return tmp_path


def loaded_with(*overrides: str) -> LoadedJob:
    return load_job(write_job(Path.cwd(), JOB), overrides)


def ask(codec: TextCodec, loaded: LoadedJob) -> Audit:
    return audited(open_corpus(loaded.job, codec, seq_len=512, loaded=loaded), codec, loaded)


def test_all_that_ask_get_the_same_audit(chatml: TextCodec, made: list[str]) -> None:
    loaded = loaded_with("evaluate.fraction=0.1")
    found: list[Audit] = []
    threads = [threading.Thread(target=lambda: found.append(ask(chatml, loaded))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["audit"]
    whole = audit(open_corpus(loaded.job, chatml, seq_len=512, loaded=loaded), chatml, loaded)
    assert found == [replace(whole, samples=(), dropped=())] * 4


@pytest.mark.parametrize(
    ("change", "audits"),
    [
        ("evaluate.fraction=0.2", 2),
        ("steps=5", 2),
        ("train.batch=2", 2),
        ("data[0].max_dropped=0.0", 2),
        ("output=elsewhere", 1),
        ("checkpoint.every=2", 1),
    ],
)
def test_another_job_has_its_own(chatml: TextCodec, made: list[str], change: str, audits: int) -> None:
    for loaded in (loaded_with(), loaded_with(change), loaded_with()):
        ask(chatml, loaded)
    assert len(made) == audits


def test_what_is_damaged_or_has_problems_is_made_again(chatml: TextCodec, made: list[str]) -> None:
    loaded = loaded_with()
    ask(chatml, loaded)
    (kept,) = Path("cache/audits").glob("*.json")
    kept.write_text("{")
    assert not ask(chatml, loaded).problems
    assert len(made) == 2
    with Path("my.jsonl").open("a") as file:
        file.write("{broken\n" * 40)
    for _ in range(2):
        assert ask(chatml, loaded).problems
    assert len(made) == 4


def test_a_cache_that_cannot_be_written_is_no_obstacle(chatml: TextCodec, made: list[str]) -> None:
    loaded = loaded_with()
    corpus = open_corpus(loaded.job, chatml, seq_len=512, loaded=loaded)
    Path("cache/audits").write_text("a file where the folder should be")
    assert not audited(corpus, chatml, loaded).problems


def test_processes_find_the_data_audited(made: list[str], folder: Path) -> None:
    loaded = loaded_with()
    check_data(RunSpec(loaded, folder, folder / "run"))
    assert made == ["audit"]
    prepared = prepare(loaded, folder)
    assert made == ["audit"]
    assert prepared.audit is not None and prepared.audit.rows_used == 40
    Path("my.jsonl").write_text("{broken\n" * 40)
    with pytest.raises(UserError, match="nothing of it would be trained"):
        check_data(RunSpec(loaded, folder, folder / "run"))


def test_an_audit_is_of_the_jobs_own_mixture(chatml: TextCodec, made: list[str]) -> None:
    for temperature in (1, 1, 2):
        ask(chatml, loaded_with("evaluate.fraction=0.1", f"mix.temperature={temperature}"))
    assert len(made) == 2


def test_a_run_says_what_its_template_does_to_prompts_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.jinja").write_text(
        "{% for m in messages %}{{ m.role + ':' }}{{ m.content }}{{ eos_token if '3' in m.content }}{% endfor %}"
        "{{ 'assistant:<think>' if add_generation_prompt }}"
    )
    words = ["data.template=some.jinja", "steps=1", "faults.restarts=0"]
    assert main(["train", str(write_job(Path.cwd(), JOB | {"data": {"path": "my.jsonl"}})), *words]) == 0
    out = capsys.readouterr().out
    assert "template   some.jinja\n" in out
    assert "not an exact prefix of the trained text in 40 rows" in out
    assert "no stop token after the last answer of 27 rows" in out
