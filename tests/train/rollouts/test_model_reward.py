"""A reward run in a policy's job: its scores are the rewards, and the critic begins as it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import run, write_job
from tokenizers import Tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.cluster.chosen_target import choose_target
from stoker.cluster.send import send
from stoker.cluster.shell import LocalShell
from stoker.cluster.submission import submission_of
from stoker.errors import UserError
from stoker.job.document.yaml_document import read_document
from stoker.job.load_job import load_job
from stoker.models.attention.collate import Inputs
from stoker.models.language_model import LanguageModel
from stoker.models.objective import Reading
from stoker.models.text import open_text_side
from stoker.models.tuning.adapters import unwrap
from stoker.scoring.answer_rows import AnswerRow
from stoker.train.preference.answer_scores import AnswerScores
from stoker.train.preference.reward_objective import offset_of
from stoker.train.prepare import prepare
from stoker.train.rollouts.model_reward import ModelReward, critic_start
from stoker.train.rollouts.rewards import PolicyAnswer
from stoker.train.rollouts.rollout_files import ROLLOUTS, RolloutFiles
from tiny_llama import SIZES, save_tiny_llama
from tiny_tokenizer import tiny_tokenizer

LORA = {"method": "lora", "rank": 4}


@pytest.fixture
def with_reward(base: Path, job: dict[str, Any]) -> dict[str, Any]:
    """A job of ``ppo`` beside a trained reward run on the same model."""
    with (base / "pairs.jsonl").open("w") as file:
        for i in range(24):
            answers = {"chosen": f"eee {i} e", "rejected": f"It is {i}."}
            file.write(json.dumps({"prompt": f"Say {i} words about the sea", **answers}) + "\n")
    shared = {key: job[key] for key in ("model", "train")}
    reward = {**shared, "task": "reward", "data": "pairs.jsonl", "steps": 6, "output": "rm", "tune": LORA}
    run(base, {**reward, "evaluate": {"fraction": 0.2, "every": 3}})
    block = {"reward": "rm", "prompts": 8, "max_tokens": 8, "epochs": 1}
    return {**{key: value for key, value in job.items() if key != "grpo"}, "task": "ppo", "tune": LORA, "ppo": block}


@pytest.mark.slow
def test_rewards_are_the_scores_of_the_reward_model(with_reward: dict[str, Any], base: Path) -> None:
    ran = run(base, {**with_reward, "steps": 1})
    reward = open_run("rm", base)
    offset = offset_of(reward.model)
    assert offset != 0.0
    model = unwrap(reward.model)
    for rollout in RolloutFiles(ran.folder.path / ROLLOUTS).read(0).rollouts:
        ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.answer_ids.tolist()]])
        with torch.no_grad():
            expected = float(model(input_ids=ids).logits[0, -1, 0]) - offset
        assert rollout.score == pytest.approx(expected, abs=1e-5)
        assert rollout.rewards == {"reward": rollout.score}


@pytest.mark.slow
def test_a_critic_begins_as_the_reward_model(with_reward: dict[str, Any], base: Path) -> None:
    ran = run(base, {**with_reward, "steps": 1})
    assert ran.prepared.facts["critic"] == "begins as the reward model"
    for rollout in RolloutFiles(ran.folder.path / ROLLOUTS).read(0).rollouts:
        # Its value after a token is the score of the answer up to there: the last value is that before the last token.
        model = unwrap(open_run("rm", base).model)
        ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.answer_ids.tolist()]])
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, :, 0] - offset_of(open_run("rm", base).model)
        first = len(rollout.prompt_ids) - 1
        np.testing.assert_allclose(rollout.tokens["value"], scores[first:-1], atol=1e-5)
        break


def test_a_critic_with_other_adapters_begins_at_random(with_reward: dict[str, Any], base: Path) -> None:
    ran = run(base, {**with_reward, "steps": 1, "tune": {**LORA, "rank": 2}})
    assert "begins at random, as tune.rank is 2 here and 4 in the reward run" in ran.prepared.facts["critic"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tune": "full"}, "begins at random, as a critic in the policy's own body has no adapter of its own"),
        ({"model": "wide"}, "begins at random, as the reward run is on"),
        ({"tune": {**LORA, "layers": "1-"}}, "begins at random, as tune.layers is 1- here and all in the reward run"),
        ({"tune": LORA}, "begins as the reward model"),
    ],
)
def test_a_critic_that_does_not_begin_as_the_reward_model_says_why(
    with_reward: dict[str, Any], base: Path, wide: Path, change: dict[str, Any], said: str
) -> None:
    job = {**with_reward, **change}
    job["model"] = str(wide) if job["model"] == "wide" else job["model"]
    assert said in critic_start("rm", load_job(write_job(base, job)), base)
    assert critic_start(None, load_job(write_job(base, job)), base) == "begins at random"


@pytest.mark.slow
def test_what_is_sent_to_another_machine_trains_there_as_here(
    with_reward: dict[str, Any], base: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The reward run and the modules of rewards are all that the job finds in the folder there."""
    block = {**with_reward["ppo"], "rewards": {"python:letter:e": 0.5}}
    here = run(base, {**with_reward, "ppo": block, "steps": 1})
    loaded = load_job(base / "job.yaml", ['target={"ssh": {"hosts": ["a"], "code": false}}'])
    submission = submission_of(loaded, choose_target(loaded, None), base)
    there = tmp_path_factory.mktemp("there")
    send(LocalShell(), submission.files, str(there), "job")
    shutil.rmtree(base / "rm")
    ran = run(there / "job", read_document(there / "job/job.yaml").data)
    assert ran.losses == here.losses
    for a, b in zip(*(RolloutFiles(r.folder.path / ROLLOUTS).read(0).rollouts for r in (here, ran)), strict=True):
        assert a.rewards == b.rewards and set(a.rewards) == {"reward", "python:letter:e"}


@pytest.mark.parametrize(
    ("named", "message"), [("rn", "there is no run"), ("run", "whose model gives no scores"), (None, "has no reward")]
)
@pytest.mark.slow
def test_wrong_rewards_are_refused(with_reward: dict[str, Any], base: Path, named: str | None, message: str) -> None:
    if named == "run":
        run(base, {**with_reward, "steps": 1})
    block = {key: value for key, value in {**with_reward["ppo"], "reward": named}.items() if value is not None}
    with pytest.raises(UserError, match=message):
        run(base, {**with_reward, "ppo": block, "output": "other"})


def test_equal_answers_have_equal_scores(
    with_reward: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of the same row at other places of a pass differ by rounding; equal answers would count as informative."""
    scores = AnswerScores(open_run("rm", base))
    rows = [[7, 8, 9], [9, 8, 7, 6, 5], [7, 8, 9]]
    alone = [scores([row])[0] for row in rows]
    read, passes = LanguageModel.read, []

    def counted(self: LanguageModel, inputs: Inputs, reading: Reading) -> torch.Tensor:
        passes.append(inputs.rows)
        return read(self, inputs, reading)

    monkeypatch.setattr(LanguageModel, "read", counted)
    found = scores(rows)
    assert found == pytest.approx(alone, abs=1e-5) and found[0] == found[2] != found[1]
    assert sum(passes) == 2 and scores([]) == []


@pytest.mark.slow
def test_a_reward_model_that_is_too_short_for_the_answers_is_refused(
    with_reward: dict[str, Any], base: Path, tokenizer: Tokenizer
) -> None:
    """A model with learnt positions would fail in the first round, and one with RoPE would score beyond its context.

    The longest row counts, not `train.seq_len`: runs that began before this check go on where their rows fit.
    """
    short = save_tiny_llama(base / "short", tokenizer, template=None, max_position_embeddings=48)
    reward = {"task": "reward", "data": "pairs.jsonl", "steps": 1, "output": "rs", "model": str(short)}
    run(base, {**reward, "train": {**with_reward["train"], "seq_len": 48}})
    short_answers = {**with_reward["ppo"], "reward": "rs"}
    assert "reward" not in run(base, {**with_reward, "ppo": short_answers, "steps": 1}).prepared.facts
    for change in ({"max_tokens": 40}, {"environment": "python:letter:reply"}):
        with pytest.raises(UserError, match=r"rows have up to \d+ tokens, and rs was built for 48"):
            run(base, {**with_reward, "ppo": {**short_answers, **change}, "output": "other"})


def test_a_reward_run_on_rows_of_another_template_is_reported(with_reward: dict[str, Any], base: Path) -> None:
    block = {"rewards": {"exact": 1.0}, "reward": "rm", "prompts": 4, "answers": 2, "max_tokens": 4}
    job = {key: value for key, value in with_reward.items() if key != "ppo"} | {"task": "grpo", "grpo": block}
    other = [{"path": with_reward["data"], "template": "chatml"}]
    for task in (job, with_reward):
        found = prepare(load_job(write_job(base, {**task, "data": other})), base).facts
        assert found["reward"].startswith("WARNING: the rows of rm have another chat template than the prompts")


@pytest.mark.slow
@pytest.mark.usefixtures("in_process_replay")
def test_an_exported_reward_model_scores_as_its_run(
    with_reward: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    assert main(["export", "rm", "--format", "merged", "--to", "classifier"]) == 0
    block = {**with_reward["ppo"], "reward": "classifier"}
    ran = run(base, {**with_reward, "ppo": block, "steps": 1})
    assert ran.prepared.facts["critic"].startswith("begins at random, as classifier is no run")
    scores = AnswerScores(open_run("rm", base))
    answers = RolloutFiles(ran.folder.path / ROLLOUTS).read(0).rollouts
    rows = [[*answer.prompt_ids.tolist(), *answer.answer_ids.tolist()] for answer in answers]
    assert [answer.score for answer in answers] == pytest.approx(scores(rows), abs=1e-5)
    own = run(base, {**with_reward, "ppo": {**block, "critic": "classifier"}, "steps": 1, "output": "own"})
    for answer in RolloutFiles(own.folder.path / ROLLOUTS).read(0).rollouts:  # the critic's values are its scores too
        before_last = [*answer.prompt_ids.tolist(), *answer.answer_ids.tolist()[:-1]]
        assert answer.tokens["value"][-1] == pytest.approx(scores([before_last])[0], abs=1e-4)
    write_job(base, {**with_reward, "ppo": {**block, "reward": with_reward["model"]}, "output": "other"})
    assert main(["train", "job.yaml", "faults.restarts=0"]) == 2
    assert "is a language model, which gives no scores; name a run of task reward" in capsys.readouterr().err


TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def foreign(base: Path) -> Path:
    """A sequence classifier with a tokenizer and a chat template of its own, which goes on after the stop token."""
    smaller = tiny_tokenizer(350)
    save_tiny_llama(base / "foreign", smaller, template=TEMPLATE)
    fast = AutoTokenizer.from_pretrained(base / "foreign", bos_token="<|endoftext|>")
    fast.save_pretrained(base / "foreign")
    sizes = {"vocab_size": len(fast), "num_labels": 1, "pad_token_id": fast.pad_token_id, "initializer_range": 0.2}
    torch.manual_seed(1)
    LlamaForSequenceClassification(LlamaConfig(**{**SIZES, **sizes})).save_pretrained(base / "foreign")
    return base / "foreign"


@pytest.mark.slow
def test_a_reward_model_with_another_tokenizer_reads_the_texts_in_its_own(
    job: dict[str, Any], base: Path, foreign: Path
) -> None:
    """The scores are those of transformers for the conversation as text, as TRL computes them."""
    block = {**job["grpo"], "rewards": [], "reward": str(foreign)}
    ran = run(base, {**job, "grpo": block, "steps": 1})
    assert "has another tokenizer, and reads the texts in its own chat template" in ran.prepared.facts["reward"]
    policy = AutoTokenizer.from_pretrained(job["model"])
    theirs = AutoTokenizer.from_pretrained(foreign)
    model = AutoModelForSequenceClassification.from_pretrained(foreign)
    rows = [json.loads(line) for line in (base / "asked.jsonl").read_text().splitlines()]
    rollouts = RolloutFiles(ran.folder.path / ROLLOUTS).read(0).rollouts
    for rollout in rollouts:
        asked = policy.decode(rollout.prompt_ids)
        prompt = next(row["prompt"] for row in rows if f"{row['prompt']}\n" in asked)
        answer = policy.decode(rollout.answer_ids, skip_special_tokens=True)
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        text = theirs.apply_chat_template(turns, tokenize=False)
        with torch.no_grad():
            logits = model(**theirs(text, add_special_tokens=False, return_tensors="pt")).logits
        assert rollout.score == pytest.approx(float(logits), abs=1e-5)
    assert len({rollout.score for rollout in rollouts}) > 4


@pytest.mark.slow
def test_a_reward_run_with_another_tokenizer_scores_as_it_is_served(
    with_reward: dict[str, Any], base: Path, foreign: Path
) -> None:
    """The score is that at the stop token, not at the line break after it."""
    save_tiny_llama(base / "other", tiny_tokenizer(350), template=TEMPLATE)
    shared = {"task": "reward", "data": "pairs.jsonl", "steps": 3, "tune": LORA}
    run(base, {**with_reward, **shared, "model": str(base / "other"), "output": "ro", "ppo": None})
    loaded = load_job(write_job(base, {**with_reward, "ppo": {**with_reward["ppo"], "reward": "ro"}}))
    reward = ModelReward("ro", loaded, base, open_text_side(loaded, base))
    turns = ({"role": "user", "content": "Say 3 words"}, {"role": "assistant", "content": "the wind"})
    answer = PolicyAnswer("the wind", AnswerRow("a", 1, (), None, (), {}), (1,), (2,), 1, True, turns)
    opened = open_run("ro", base)
    text = "[user]Say 3 words<|im_end|>\n[assistant]the wind<|im_end|>"
    ids = opened.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert reward([answer]) == pytest.approx(AnswerScores(opened)([ids]), abs=1e-5)


@pytest.mark.parametrize(
    ("template", "context", "message"),
    [
        (None, 128, "has another tokenizer than the policy, and no chat template"),
        ("{{ raise_exception('no system') }}", 128, "asked.jsonl:.*the chat template of .* refuses .*no system"),
        (TEMPLATE, 16, r"asked.jsonl:.*this prompt has \d+ tokens of .*, which was built for 16; lower max_tokens"),
    ],
)
def test_texts_that_a_reward_model_cannot_read_are_refused(
    job: dict[str, Any], base: Path, foreign: Path, template: str | None, context: int, message: str
) -> None:
    fast = AutoTokenizer.from_pretrained(foreign)
    (foreign / "chat_template.jinja").unlink(missing_ok=True)
    fast.chat_template = template
    fast.save_pretrained(foreign)
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    with pytest.raises(UserError, match=message):
        run(base, {**job, "grpo": {**job["grpo"], "rewards": [], "reward": str(foreign)}, "steps": 1})
