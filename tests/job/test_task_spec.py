"""The commands that a finished run suggests."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.checkpoint.export.write_export import Export, check_request
from stoker.errors import UserError
from stoker.job.load_job import load_job
from stoker.job.task_spec import export_or_serve


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("model=llama-3m tune=full", "export run --format merged --to exported"),
        ("model=llama-3m tune=prompt", "serve run"),
        ("model=smollm2-135m tune=lora", "export run --format merged --to exported"),
        ("model=smollm2-135m tune=prompt", "export run --format adapter --to exported"),
        ("model=smollm2-135m tune=prompt model.config.rope_theta=1e5", "serve run"),
        ("model=smollm2-135m tune=qlora", "export run --format adapter --to exported"),
    ],
)
def test_a_suggested_export_is_possible(words: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("task: sft\ndata: rows.jsonl\nsteps: 1\n")
    job = load_job(tmp_path / "job.yaml", words.split()).job
    assert export_or_serve(job, "run") == command
    suggested = command.split()[3] if command.startswith("export") else None
    for form in (suggested,) if suggested else ("merged", "adapter", "gguf"):
        try:
            check_request(job, Export(form, tmp_path / "exported"))
        except UserError:
            assert form != suggested
        else:
            assert form == suggested
