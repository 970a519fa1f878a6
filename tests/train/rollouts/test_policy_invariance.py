"""What a policy learns does not depend on padding, packing or micro-batches; without steps nothing drifts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import Ran, run

from stoker.models.attention.collate import Inputs
from stoker.parallel.float64_mode import in_float64
from stoker.train.language.language_task import LanguageTask
from stoker.train.prepared import Prepared
from stoker.train.rollouts.rollout_files import ROLLOUTS, RolloutFiles


def padded(prepared: Prepared) -> None:
    """Lays rows out side by side with padding, as for models that cannot be packed."""
    task = prepared.task
    assert isinstance(task, LanguageTask) and task.language.packs
    task.language = replace(task.language, packs=False)


@pytest.mark.parametrize("task", ["grpo", "ppo"])
@pytest.mark.slow
@pytest.mark.often("ppo")
def test_steps_do_not_depend_on_padding_or_micro_batches(
    task: str, job: dict[str, Any], ppo: dict[str, Any], base: Path
) -> None:
    job = {**(job if task == "grpo" else ppo), "steps": 2}
    many = [f"Say {'very ' * (i % 5)}short words {i}" for i in range(24)]  # prompts of uneven length
    (base / "asked.jsonl").write_text("".join(f'{{"prompt": "{text}", "expected": "{text}"}}\n' for text in many))

    def trained(name: str, micro_batch: int, **how: Any) -> Ran:
        train = {**job["train"], "precision": "fp64", "micro_batch": micro_batch}
        with in_float64():
            return run(base, {**job, "output": name, "train": train}, **how)

    expected = trained("one", 8)
    others = [trained("alone", 1), trained("padded", 4, before=padded)]
    masks = [part.inputs.mask for part in others[1].prepared.task.parts(8, 16) if isinstance(part.inputs, Inputs)]
    assert any(mask is not None and (mask == 0).any() for mask in masks)
    answers = [RolloutFiles(ran.folder.path / ROLLOUTS).read(0).rollouts for ran in (expected, *others)]
    for ran, found in zip(others, answers[1:], strict=True):
        assert ran.losses == pytest.approx(expected.losses, abs=1e-10)
        for a, b in zip(answers[0], found, strict=True):
            assert a.answer_ids.tolist() == b.answer_ids.tolist()
            for column, values in a.tokens.items():
                np.testing.assert_allclose(b.tokens[column], values, atol=1e-6, err_msg=column)
        for name, tensor in expected.last_state().tensors.items():
            torch.testing.assert_close(ran.last_state().tensors[name], tensor, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_without_a_learning_rate_sampling_and_training_stay_as_close_as_they_began(
    task: str, job: dict[str, Any], ppo: dict[str, Any], base: Path
) -> None:
    """No weight moves by so little; the log-probabilities of sampling and training differ by rounding throughout."""
    job = job if task == "grpo" else ppo
    block = {**job[task], "prompts": 2, "answers": 2, "epochs": 1}
    ran = run(base, {**job, "steps": 6, task: block, "train": {**job["train"], "batch": 4, "lr": 1e-30}})
    lines = ran.folder.read_metrics()
    files = RolloutFiles(ran.folder.path / ROLLOUTS)
    apart = [files.read(number).figures["logprob_difference"] for number in files.numbers()]
    assert len(apart) == 6 and max(apart) < 2e-7
    assert [line["ratio"] for line in lines] == pytest.approx([1.0] * 6, abs=1e-6)
    assert [line["kl"] for line in lines] == pytest.approx([0.0] * 6, abs=1e-5)
