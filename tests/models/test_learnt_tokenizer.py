"""A vocabulary learnt from a job's data depends on all that decides which texts are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.errors import UserError
from stoker.job import load_job
from stoker.models.tokenizers.job_tokenizer import load_tokenizer
from stoker.models.tokenizers.save_tokenizer import check_target, read_texts


def test_jobs_that_read_other_columns_of_a_file_learn_other_vocabularies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    rows = [{"title": "a long silver river", "body": "forty broken windows"}] * 20
    (tmp_path / "my.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def vocabulary(column: str) -> dict[str, int]:
        source = f"{{path: my.jsonl, format: text, columns: {{text: {column}}}}}"
        (tmp_path / "job.yaml").write_text(f"task: pretrain\nmodel: llama-3m\nsteps: 1\ndata: {source}\n")
        return load_tokenizer(load_job(tmp_path / "job.yaml").job, tmp_path).get_vocab()

    titles, bodies = vocabulary("title"), vocabulary("body")
    assert "Ġsilver" in titles and "Ġsilver" not in bodies
    assert "Ġwindows" in bodies
    assert vocabulary("title") == titles


def test_one_line_cannot_be_measured_on(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a single line of text")
    with pytest.raises(UserError, match="nothing of it can be held out"):
        read_texts(["one.txt"], [], tmp_path)


@pytest.mark.parametrize("folder", [".", "mine/.."])
def test_a_tokenizers_folder_has_a_name(folder: str) -> None:
    with pytest.raises(UserError, match="needs a name"):
        check_target(Path(folder))
