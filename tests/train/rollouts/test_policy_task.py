"""Jobs of ``grpo`` from sampling to learning: what is kept, what a restart does, what is learnt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import Ran, run, write_job

from stoker.cli.main import main
from stoker.errors import UserError
from stoker.generate.decoder import Decoder
from stoker.job.document.job_to_yaml import job_lines
from stoker.job.inputs import scorer_files
from stoker.job.load_job import load_job
from stoker.job.task_spec import task_of
from stoker.train.prepared import Prepared
from stoker.train.rollouts import answer_collector
from stoker.train.rollouts.rollout_files import ROLLOUTS, RolloutFiles
from stoker.train.task import Part


def files_of(ran: Ran) -> RolloutFiles:
    return RolloutFiles(ran.folder.path / ROLLOUTS)


def test_answers_are_kept_with_all_that_is_known_of_them(job: dict[str, Any], base: Path) -> None:
    ran = run(base, {**job, "evaluate": {"fraction": 0.2, "every": 3}})
    files = files_of(ran)
    assert files.numbers() == [0, 1] and [files.read(n).step for n in (0, 1)] == [1, 5]
    iteration = files.read(1)
    assert [r.prompt for r in iteration.rollouts] == [p for p in range(4, 8) for _ in range(4)]
    for rollout in iteration.rollouts:
        assert {len(values) for values in rollout.tokens.values()} == {len(rollout.answer_ids)}
        assert rollout.tokens.keys() == {"sampled", "old", "entropy", "reference", "advantage"}
        np.testing.assert_allclose(rollout.tokens["sampled"], rollout.tokens["old"], atol=1e-5)
        assert rollout.rewards == {"python:letter:e": rollout.score} and 0 <= rollout.score <= 1
    first = files.read(0)
    for rollout in first.rollouts:  # the reference is the model as it was
        np.testing.assert_allclose(rollout.tokens["reference"], rollout.tokens["old"], atol=1e-6)
    assert any(np.abs(r.tokens["reference"] - r.tokens["old"]).max() > 1e-4 for r in iteration.rollouts)
    lines = ran.folder.read_metrics()
    assert lines[0]["ratio"] == pytest.approx(1.0, abs=1e-5) and lines[0]["approx_kl"] == pytest.approx(0.0, abs=1e-8)
    assert lines[1]["ratio"] != 1.0
    names = {"score", "kl", "entropy", "approx_kl", "clip_fraction", "ratio", "response_tokens", "ended"}
    names |= {"informative", "loss_kl"}
    assert names | {"logprob_difference", "rollout_seconds"} <= lines[0].keys()
    assert lines[0]["rollout_seconds"] > 0 == lines[1]["rollout_seconds"]
    held_out = [event for event in ran.folder.read_events() if event["event"] == "evaluated"]
    assert [event["loss"] for event in held_out] == [-event["score"] for event in held_out] and len(held_out) == 3


def test_no_gradients_of_the_last_step_are_held_while_answers_are_sampled(
    job: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    before = answer_collector.sampled

    def noted(decoder: Decoder, *arguments: Any, **more: Any) -> Any:
        held.append(any(parameter.grad is not None for parameter in decoder.model.parameters()))
        return before(decoder, *arguments, **more)

    monkeypatch.setattr(answer_collector, "sampled", noted)
    run(base, {**job, "steps": 5, "evaluate": {"fraction": 0.2, "every": 5}})
    assert len(held) >= 3 and not any(held)


def test_prompts_have_no_loss(
    job: dict[str, Any], base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base)
    ran = run(base, {**job, "steps": 1, "evaluate": {"fraction": 0.2}})
    (base / "said.jsonl").write_text('{"prompt": "Say 3 words", "completion": "The sea."}\n')
    assert main(["eval", "run", "said.jsonl"]) == 0
    capsys.readouterr()
    for words in ([], ["asked.jsonl"], ["--by-token", "2"], ["asked.jsonl", "--by-token", "2"], ["--against", "run"]):
        assert main(["eval", "run", *words]) == 2
        assert "--answers FILE" in capsys.readouterr().err
    assert "eval run --answers YOUR.jsonl" in task_of(ran.loaded.job).next_commands(ran.loaded.job, "run")


@pytest.mark.slow
def test_a_run_that_stops_within_an_iteration_goes_on_to_the_bit(job: dict[str, Any], base: Path) -> None:
    whole = run(base, {**job, "output": "whole"})
    stopped = run(base, {**job, "output": "parts", "steps": 3})
    before = files_of(stopped).read(0)
    rest = run(base, {**job, "output": "parts"})
    assert rest.losses == whole.losses
    for name, tensor in whole.last_state().tensors.items():
        assert (tensor == rest.last_state().tensors[name]).all(), name
    seconds = [line["rollout_seconds"] for line in rest.folder.read_metrics()]
    assert [step for step, spent in enumerate(seconds, 1) if spent] == [1, 5]
    after, expected = files_of(rest), files_of(whole)
    assert all(
        (a.answer_ids == b.answer_ids).all() for a, b in zip(before.rollouts, after.read(0).rollouts, strict=True)
    )
    for a, b in zip(after.read(1).rollouts, expected.read(1).rollouts, strict=True):
        assert (a.answer_ids == b.answer_ids).all() and (a.tokens["old"] == b.tokens["old"]).all()


def test_a_run_goes_on_without_its_first_answers(job: dict[str, Any], base: Path) -> None:
    begun = run(base, {**job, "steps": 4})
    begun.folder.path.joinpath(ROLLOUTS, "00000000.npz").unlink()
    rest = run(base, {**job, "steps": 5})
    assert rest.outcome.step == 5 and files_of(rest).numbers() == [1]


def test_a_run_whose_reward_has_changed_does_not_go_on(job: dict[str, Any], base: Path) -> None:
    run(base, {**job, "steps": 2})
    (base / "letter.py").write_text((base / "letter.py").read_text().replace('"e"', '"a"'))
    with pytest.raises(UserError, match=r"has changed since the run .*; restore it; .*export .* --format merged"):
        run(base, {**job, "steps": 4})


def test_only_a_schema_is_a_file_that_a_reward_reads(job: dict[str, Any], base: Path) -> None:
    """A pattern may be the name of a file, or longer than one."""
    (base / "form.json").write_text('{"type": "object"}')
    rewards = ["json_schema:form.json", "regex:asked.jsonl", f"regex:{'a' * 300}"]
    loaded = load_job(write_job(base, {**job, "grpo": {**job["grpo"], "rewards": rewards}}))
    assert list(scorer_files(loaded.job, base)) == [base / "form.json"]


def test_a_run_that_its_reward_ended_goes_on_with_the_corrected_reward(
    job: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = (base / "letter.py").read_text()
    failing = reward.replace("):\n", "):\n    calls.append(1 / (20 - len(calls)))\n", 1)
    (base / "letter.py").write_text(f"calls = []\n{failing}")
    monkeypatch.delitem(sys.modules, "letter", raising=False)
    with pytest.raises(UserError, match="raised ZeroDivisionError"):
        run(base, job)
    (base / "letter.py").write_text(reward)
    del sys.modules["letter"]
    resumed = run(base, {**job, "steps": 5})
    events = resumed.folder.read_events()
    assert [e["files"] for e in events if e["event"] == "code_changed"] == [["letter.py"]]
    assert [e["step"] for e in events if e["event"] == "resumed"] == [4] and resumed.outcome.step == 5
    (base / "letter.py").write_text(reward.replace('"e"', '"a"'))
    with pytest.raises(UserError, match="has changed since the run"):
        run(base, job)


def test_each_answer_is_rewarded_with_the_row_of_its_prompt(job: dict[str, Any], base: Path) -> None:
    (base / "rows_of_tests.py").write_text("def expected(answer, expected, row):\n    return float(expected)\n")
    ran = run(base, {**job, "steps": 1, "grpo": {**job["grpo"], "rewards": "python:rows_of_tests:expected"}})
    rollouts = RolloutFiles(ran.folder.path / ROLLOUTS).read(0).rollouts
    assert [rollout.score for rollout in rollouts] == [rollout.row - 1 for rollout in rollouts]  # the first row has 0
    assert len({rollout.row for rollout in rollouts}) == 4


def test_every_prompt_is_answered_once_in_an_epoch(job: dict[str, Any], base: Path) -> None:
    del job["steps"]
    grpo = {**job["grpo"], "prompts": 5, "answers": 2, "epochs": 1}
    ran = run(base, {**job, "epochs": 1, "grpo": grpo, "train": {**job["train"], "batch": 10}})
    iterations = [files_of(ran).read(n) for n in files_of(ran).numbers()]
    assert [len(it.rollouts) for it in iterations] == [10, 10, 10, 10, 8]
    rows = [r.row for it in iterations for r in it.rollouts]
    assert sorted(rows) == sorted([*range(1, 25)] * 2) and ran.outcome.step == 5


def test_a_run_whose_last_round_was_smaller_does_not_go_on_to_more_epochs(job: dict[str, Any], base: Path) -> None:
    del job["steps"]
    job |= {"grpo": {**job["grpo"], "prompts": 5, "answers": 2, "epochs": 1}, "train": {**job["train"], "batch": 10}}
    run(base, {**job, "epochs": 1})
    with pytest.raises(UserError, match="ended with a round of fewer prompts"):
        run(base, {**job, "epochs": 2})


def test_an_upper_clip_follows_the_lower_one(job: dict[str, Any], base: Path) -> None:
    def clips(loss: str) -> tuple[float, float]:
        loaded = load_job(
            write_job(base, {**job, "grpo": {"rewards": "exact", "loss": loss, "clip": 0.1, "max_tokens": 8}})
        )
        return loaded.job.grpo.clip, loaded.job.grpo.clip_high  # type: ignore[attr-defined]

    assert clips("grpo") == (0.1, 0.1) and clips("dapo") == (0.1, 0.28)


def test_prompts_whose_answers_all_score_alike_are_replaced(job: dict[str, Any], base: Path) -> None:
    (base / "some.py").write_text(
        "def some(answer, expected, row):\n    return float(len(answer) % 2) if int(expected) % 2 else 0.5\n"
    )
    grpo = {**job["grpo"], "rewards": "python:some:some", "loss": "dapo", "dynamic": 6, "epochs": 1}
    ran = run(base, {**job, "steps": 2, "grpo": grpo, "train": {**job["train"], "batch": 16}})
    first, second = files_of(ran).read(0), files_of(ran).read(1)
    assert first.next_prompt > 4 and second.rollouts[0].prompt >= first.next_prompt
    kept = [r for r in first.rollouts if r.row % 2 == 0]  # rows count from 1, so these expect an odd number
    assert len(first.rollouts) == 16 and len(kept) >= 12


OFTEN = ("grpo",)
SELDOM = [
    pytest.param(loss, marks=pytest.mark.exhaustive) for loss in ("dr_grpo", "dapo", "gspo", "rloo", "reinforce++")
]


@pytest.mark.parametrize("loss", [*OFTEN, *SELDOM])
def test_every_loss_learns_to_write_a_letter(job: dict[str, Any], base: Path, loss: str) -> None:
    train = {**job["train"], "batch": 64, "lr": 1e-2}
    grpo = {**job["grpo"], "loss": loss, "kl": 0.0, "answers": 16, "epochs": 1}
    ran = run(base, {**job, "steps": 50, "grpo": grpo, "train": train, "checkpoint": {"every": 50, "memory": 0}})
    lines = ran.folder.read_metrics()
    scores = [line["score"] for line in lines]
    assert [line["ratio"] for line in lines] == pytest.approx([1.0] * len(lines), abs=1e-4)  # a step on each iteration
    assert np.mean(scores[:3]) < 0.2
    assert np.mean(scores[-5:]) > 0.95


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grpo": {"rewards": "lenght:4", "max_tokens": 8}}, "no scorer 'lenght'"),
        ({"grpo": {"rewards": ["exact"], "max_tokens": 100000}}, "leave no room for a prompt"),
        ({"grpo": {"rewards": "exact", "answers": 1}}, "compares the answers to a prompt, and there is one"),
        ({"grpo": {"rewards": "exact", "prompts": 3}}, "does not divide the 24 answers"),
        ({"parallel": {"pipeline": 2}}, "cache of keys and values, which pipeline splits"),
        ({"tune": {"method": "prompt", "tokens": 4}}, "so there is no reference for a KL"),
        ({"grpo": None}, "needs the block `grpo`"),
        ({"tune": {"method": "lora", "modules_to_save": ["lm_head"]}}, "modules trained whole have no other weights"),
        ({"tune": {"method": "lora", "dropout": 0.1}}, "dropout changes the policy"),
        ({"data": [{"path": "asked.jsonl", "too_long": "split"}]}, "would make prompts of parts of answers"),
        ({"grpo": {"rewards": "exact", "kl": 0.0, "kl_estimator": "k2"}}, "has no effect without a KL"),
        ({"grpo": {"rewards": "exact", "kl": 0.0, "kl_in": "reward"}}, "has no effect without a KL"),
        ({"grpo": {"rewards": "exact", "loss": "rloo", "kl_estimator": "k2"}}, "a KL in the reward is estimated by k1"),
        ({"grpo": {"rewards": {"exact": 0.0, "numeric": 1.0}}}, "the reward exact has a weight of 0"),
        ({"grpo": {"rewards": ["exact", "numeric", "exact"]}}, r"the reward exact is given twice.*write {exact: 2}"),
        ({"grpo": {"rewards": "exact", "max_tokens": 64}}, "leave no room for a prompt in 64 tokens"),
    ],
)
def test_wrong_jobs_say_what_is_wrong(job: dict[str, Any], base: Path, change: dict[str, Any], message: str) -> None:
    changed = {key: value for key, value in {**job, **change}.items() if value is not None}
    changed["train"] = {**changed["train"], "batch": 16}
    with pytest.raises(UserError, match=message):
        run(base, changed)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"kl_horizon": 5}, "no effect with a fixed coefficient"),
        ({"kl_target": 6.0, "kl": 0.0}, "multiplies the coefficient `kl`, which must be above 0"),
        ({"critic_warmup": 3}, "the critic is trained alone for 6 steps, and the run has 6 .*; write at most 2 rounds"),
        ({"kl_estimator": "k2"}, "a KL in the reward is estimated by k1"),
    ],
)
def test_keys_of_ppo_without_effect_are_refused(ppo: dict[str, Any], base: Path, block: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_job(write_job(base, {**ppo, "train": {**ppo["train"], "batch": 8}, "ppo": {**ppo["ppo"], **block}}))


def test_a_job_with_every_key_written_is_as_valid_as_before(
    ppo: dict[str, Any], job: dict[str, Any], base: Path
) -> None:
    for given in (
        ppo,
        job,
        {**job, "grpo": {**job["grpo"], "loss": "rloo"}},
        {**job, "grpo": {**job["grpo"], "kl": 0.0}},
    ):
        loaded = load_job(write_job(base, given))
        written = "".join(f"{line}\n" for line, _ in job_lines(loaded.job))
        (base / "whole.yaml").write_text(written)
        assert load_job(base / "whole.yaml").job == loaded.job


def test_prompts_that_leave_no_room_for_an_answer_are_dropped(job: dict[str, Any], base: Path) -> None:
    """A prompt and its sampled answer are within `train.seq_len`."""
    with (base / "asked.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "sea " * 60, "expected": "1"}) + "\n")
    ran = run(base, {**job, "steps": 2, "data": [{"path": "asked.jsonl", "too_long": "drop", "max_dropped": 0.5}]})
    assert ran.prepared.audit.rows_dropped == 1
    rollouts = files_of(ran).read(0).rollouts
    assert max(len(r.prompt_ids) + len(r.answer_ids) for r in rollouts) <= 64


def test_a_policy_that_is_not_the_one_that_answered_is_told(job: dict[str, Any], base: Path) -> None:
    def disturb(prepared: Prepared) -> None:
        parts = prepared.task.parts

        def disturbed(first: int, last: int) -> list[Part]:
            with torch.no_grad():
                for parameter in prepared.task.model.parameters():
                    parameter.mul_(1.5)
            return parts(first, last)

        prepared.task.parts = disturbed  # type: ignore[method-assign]

    for name, before, expected in (("run", disturb, 1), ("sound", lambda _: None, 0)):
        ran = run(base, {**job, "steps": 1, "output": name}, before=before)
        told = [event["what"] for event in ran.folder.read_events() if event["event"] == "alarm"]
        assert sum("before the first step on new answers, and must be 1" in text for text in told) == expected


def test_held_out_prompts_may_be_in_a_file_of_their_own(job: dict[str, Any], base: Path) -> None:
    (base / "other.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two", "expected": "2"}\n')
    grpo = {**job["grpo"], "rewards": "length:1-8"}  # of which every answer gets 1
    ran = run(base, {**job, "steps": 1, "grpo": grpo, "evaluate": {"data": "other.jsonl"}})
    held_out = [event for event in ran.folder.read_events() if event["event"] == "evaluated"]
    assert [(event["targets"], event["score"], event["loss"]) for event in held_out] == [(2, 1.0, -1.0)] * 2


def test_answers_to_held_out_prompts_are_greedy(job: dict[str, Any], base: Path) -> None:
    """Equal prompts have equal answers there, before and after training, and others in training."""
    (base / "other.jsonl").write_text('{"prompt": "one"}\n' * 4)
    (base / "noting.py").write_text(
        "def some(answer, expected, row):\n"
        f"    with open({str(base / 'answers.txt')!r}, 'a') as file:\n"
        "        print(row['prompt'] == 'one', ascii(answer), file=file)\n"
        "    return 0.0\n"
    )
    grpo = {**job["grpo"], "rewards": "python:noting:some"}
    run(base, {**job, "steps": 1, "grpo": grpo, "evaluate": {"data": "other.jsonl"}})
    lines = [line.split(" ", 1) for line in (base / "answers.txt").read_text().splitlines()]
    held_out, sampled = ([text for kind, text in lines if kind == which] for which in ("True", "False"))
    assert len(held_out) == 8 and len(set(held_out[:4])) == len(set(held_out[4:])) == 1
    assert len(set(sampled)) > 4


@pytest.mark.parametrize(
    "answers", [{}, {"expected": None}, {"chosen": "1", "rejected": "2"}, {"completion": "1", "label": False}]
)
def test_a_row_without_an_expected_answer_is_dropped(answers: dict[str, Any], job: dict[str, Any], base: Path) -> None:
    (base / "asked.jsonl").write_text(f"{json.dumps({'prompt': 'one', **answers})}\n" * 8)
    scored = {**job, "grpo": {**job["grpo"], "rewards": "numeric"}}
    with pytest.raises(UserError, match=r"all of its 8 rows are dropped: no expected answer, .* a column `expected`"):
        run(base, scored)


def test_a_row_whose_expected_answer_a_reward_cannot_use_is_dropped(job: dict[str, Any], base: Path) -> None:
    (base / "asked.jsonl").write_text(f"{json.dumps({'prompt': 'one', 'expected': 'none'})}\n" * 8)
    scored = {**job, "grpo": {**job["grpo"], "rewards": ["numeric", "exact"]}}
    with pytest.raises(UserError, match=r"its 8 rows are dropped: a reward cannot compare .* a number for numeric"):
        run(base, scored)


def test_prompts_are_no_rows_for_other_tasks(base: Path, sft: dict[str, Any]) -> None:
    (base / "asked.jsonl").write_text('{"prompt": "one"}\n' * 8)
    data = [{"path": "asked.jsonl", "format": "question"}]
    loaded = load_job(write_job(base, {**sft, "data": data}))
    assert loaded.job.data[0].format == "question"
    with pytest.raises(UserError, match="its rows are prompts without answers; task sft trains on answers"):
        run(base, {**sft, "data": data})


def test_answers_of_weights_that_were_given_up_do_not_count(job: dict[str, Any], base: Path) -> None:
    """Where training goes back, answers that later weights have sampled are sampled again, and no others."""
    ran = run(base, job)
    task, files = ran.prepared.task, files_of(ran)
    assert [files.read(n).step for n in (0, 1)] == [1, 5]
    before = files.read(1).rollouts
    task.reach(40, 48, 6, ran.prepared.engine)
    assert files.read(1).step == 5
    task.reach(40, 48, 3, ran.prepared.engine)
    again = files.read(1)
    assert again.step == 3
    sampled = zip(again.rollouts, before, strict=True)
    assert any(a.answer_ids.tolist() != b.answer_ids.tolist() for a, b in sampled)
    task.reach(8, 16, 2, ran.prepared.engine)
    assert files.read(0).step == 1
