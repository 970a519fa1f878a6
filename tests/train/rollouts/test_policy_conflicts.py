"""Checks of a policy's numbers, written or following from other keys, and the job.yaml of runs with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import UserError
from stoker.job import load_job
from stoker.job.document.job_to_yaml import dump_job

GRPO = (
    "task: grpo\nmodel: smollm2-135m\ndata: asked.jsonl\nsteps: 20\ntune: lora\ngrpo: {rewards: numeric, answers: 6}\n"
)
PPO = "task: ppo\nmodel: smollm2-135m\ndata: asked.jsonl\nsteps: 20\ntune: lora\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GRPO + "parallel: {devices: [0, 1, 2, 3, 4, 5]}\n", "8 prompts cannot be shared by 6"),
        (GRPO + "train: {batch: 48, micro_batch: 16, accumulation: 1}\n", "8 prompts cannot be shared by 3"),
        (GRPO + "train: {batch: 6, micro_batch: 5}\n", "write micro_batch 3 or 6"),
        (GRPO.replace("answers", "clip: 0, answers"), "`clip: 0` leaves the probability ratio no range"),
        (GRPO.replace("answers", "clip_high: 0, answers"), "`clip_high: 0` leaves the probability ratio no range"),
        (GRPO.replace("answers", "clip: 2, answers"), "`clip: 2` clips no probability ratio, as 1 - 2 is not above 0"),
        (GRPO + "train: {micro_batch: 5}\n", "train.batch is 5, which does not divide the 48 answers"),
        (PPO + "ppo: {rewards: numeric, prompts: 8, critic_warmup: 2}\ntrain: {micro_batch: 2}\n", "for 32 steps"),
        (
            GRPO.replace("tune: lora", "tune: {method: p-tuning, deep: true}").replace("answers", "kl: 0, answers")
            + "parallel: {data: 2, shard: zero2}\n",
            "a prefix' encoder is not gathered",
        ),
    ],
)
def test_numbers_that_follow_from_other_keys_are_checked(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    "text",
    [
        GRPO + "train: {micro_batch: 6}\nparallel: {devices: [0, 1, 2, 3]}\n",
        GRPO + "parallel: auto\n",
        PPO + "ppo: {rewards: numeric, prompts: 8, critic_warmup: 2}\n",
    ],
)
def test_an_accepted_job_is_accepted_as_it_is_written(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    job = load_job(tmp_path / "job.yaml").job
    (tmp_path / "written.yaml").write_text(dump_job(job))
    assert load_job(tmp_path / "written.yaml").job == job


@pytest.mark.parametrize(
    "text",
    [
        GRPO + "train: {batch: 5}\n",
        GRPO.replace("answers", "clip: 2, clip_high: 0, answers"),
        GRPO + "train: {batch: 48}\nparallel: {data: 6}\n",
        PPO + "ppo: {rewards: numeric, prompts: 8, critic_warmup: 9}\ntrain: {batch: 8}\n",
    ],
)
def test_the_recorded_job_of_an_earlier_run_is_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError):
        load_job(tmp_path / "job.yaml")
    (tmp_path / "events.jsonl").touch()
    assert load_job(tmp_path / "job.yaml").job.steps == 20
