"""Answers of several turns: what the model is told between them, and that it learns from its own tokens only."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from running import run, write_job
from test_policy_layouts import check_alike, trained
from test_policy_task import files_of
from tokenizers import Tokenizer

from stoker.cli.main import main
from stoker.data.corpus import TokenisedSource
from stoker.data.files.rows import Message
from stoker.data.sources import open_source
from stoker.data.templates.chat_template import as_template_message
from stoker.data.text_codec import TextCodec
from stoker.data.token_cache import TokenCache
from stoker.errors import UserError
from stoker.generate.request import Request
from stoker.hardware.process_device import Device
from stoker.job.resolved import ResolvedSource
from stoker.launch.process_pool import Pool
from stoker.resilience.stop_signals import SignalExit, exit_at_signals
from stoker.scoring.answer_rows import AnswerRow
from stoker.train.rollouts import answer_sampling
from stoker.train.rollouts.environment import Environment, Reply
from tiny_llama import save_tiny_llama

TOOL = '''
def reply(messages, row):
    """What a tool gives, and the end after the model's second turn."""
    assert messages[-1]["role"] == "assistant" and messages[0]["content"] == row["prompt"]
    if sum(message["role"] == "assistant" for message in messages) == 2:
        return None
    return {"role": "tool", "content": f"It is {row['expected']} <|im_end|>"}

def turns(answers, rows):
    return [float(sum(m["role"] == "assistant" for m in row["messages"])) for row in rows]

def long(messages, row):
    return "a" * len(messages)

def in_turn(answers, rows):
    said = [[m["role"] for m in row["messages"]] for row in rows]
    return [float(roles == ["user", "assistant"] * (len(roles) // 2)) for roles in said]

def fails(messages, row):
    raise ValueError("no such tool")

def number(messages, row):
    return 3
'''


@pytest.fixture
def episodes(job: dict[str, Any], base: Path) -> dict[str, Any]:
    """A job in which many a token ends a turn, and a tool answers the first one."""
    (base / "tool_of_tests.py").write_text(TOOL)
    vocabulary = json.loads((Path(job["model"]) / "tokenizer.json").read_text())["model"]["vocab"]
    written = "Say words about the sea system user assistant tool role content It is"
    stop = [token for token in vocabulary if token.isascii() and token.isalpha() and token not in written]
    grpo = {**job["grpo"], "rewards": "python:tool_of_tests:turns", "environment": "python:tool_of_tests:reply"}
    model = {"name": job["model"], "stop": stop}
    return {**job, "model": model, "grpo": {**grpo, "max_tokens": 16}, "steps": 5}


def test_a_signal_within_the_function_ends_the_command(chatml: TextCodec) -> None:
    environment = Environment("waits", lambda turns, row: signal.raise_signal(signal.SIGTERM), [chatml], turns=2)
    with pytest.raises(SignalExit), exit_at_signals():
        environment([], AnswerRow("rows.jsonl", 1, (), None, (), {}), 0)


def test_a_reply_has_the_template_of_its_rows_source(codec_of: Callable[..., TextCodec]) -> None:
    plain = codec_of("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    environment = Environment("more", lambda turns, row: "more", [codec_of("chatml"), plain], turns=2)
    row = AnswerRow("rows.jsonl", 1, ({"role": "user", "content": "Why?"},), None, (), {})
    replies = [environment([*row.turns, {"role": "assistant", "content": "So."}], row, source) for source in (0, 1)]
    texts = [plain.tokenizer.decode(reply.ids) for reply in replies if reply is not None]  # without special tokens
    assert texts == ["\nuser\nmore\nassistant\n", "[user]more"]
    assert replies[0] is not None and replies[0].ids[0] not in plain.stop_ids  # which the model's turn has already


@pytest.mark.parametrize("last", ["length", "stop"])
def test_every_turn_of_every_answer_has_random_numbers_of_its_own(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn follows one that ends with the last of an answer's tokens."""
    seeds: list[int] = []
    most: list[int] = []

    class TwoTokens:
        """An engine whose answers to all requests are two tokens, the third time perhaps without an end."""

        def __init__(self, decoder: object, memory: float) -> None: ...

        def run(self, requests: Sequence[Request]) -> list[Any]:
            seeds.extend(request.sampling.seed for request in requests)
            most.extend(request.max_tokens for request in requests)
            token, ended = SimpleNamespace(log_probability=-1.0), "stop" if len(most) < 12 else last
            return [SimpleNamespace(ids=[5, 2], tokens=[token, token], ended=ended) for _ in requests]

    monkeypatch.setattr(answer_sampling, "GenerationEngine", TwoTokens)
    monkeypatch.setattr(answer_sampling, "free_memory", lambda _: 1.0)
    decoder: Any = SimpleNamespace(device=Device("cpu", "fp32", ""), context=None)
    prompts = [answer_sampling.Prompt(number, np.array([7]), "rows.jsonl", number) for number in range(2)]
    found = answer_sampling.sampled(
        decoder, prompts, answers=2, max_tokens=6, temperature=1.0, stop_ids=frozenset([2]), seed=0,
        go_on=lambda waiting: [Reply([], (9,)) for _ in waiting] or None,
    )  # fmt: skip
    assert [episode.ids for episode in found] == [[5, 2, 9, 5, 2, 9, 5, 2]] * 4
    assert len(seeds) == len(set(seeds)) == 12  # four answers of three turns
    assert most == [6] * 4 + [4] * 4 + [2] * 4  # what the turns before have left of an answer's own tokens
    assert {episode.ended for episode in found} == {last}


def test_calls_of_tools_in_a_prompt_reach_the_environment(base: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    turns = [
        {"role": "user", "content": "1+?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 2."},
    ]
    block = ResolvedSource(path="rows.jsonl", too_long="drop")
    source = TokenisedSource(block, open_source(block, base), "messages", cast(TokenCache, None), False, prompts=True)
    asked, expected = source.prompt_and_expected({"messages": turns})
    assert as_template_message(asked[1])["tool_calls"] == [call] and expected == "It is 2."
    trl = {"messages": turns[:1], "completion": [{"role": "assistant", "content": "2"}]}
    assert source.prompt_and_expected(trl) == ((Message("user", "1+?"),), "2")
    asked, expected = source.prompt_and_expected({"messages": turns[:3]})
    assert [turn.role for turn in asked] == ["user", "assistant", "tool"] and expected is None


def test_only_the_models_own_tokens_are_learnt_from(episodes: dict[str, Any], base: Path) -> None:
    ran = run(base, episodes)
    text = ran.prepared.text
    assert text is not None
    several, special = 0, text.tokenizer.convert_tokens_to_ids("<|im_end|>")
    for rollout in (r for number in (0, 1) for r in files_of(ran).read(number).rollouts):
        assert {len(values) for values in rollout.tokens.values()} == {rollout.length}
        np.testing.assert_allclose(rollout.tokens["sampled"], rollout.tokens["old"], atol=1e-5)
        if rollout.own is None:
            continue
        several += 1
        told = text.tokenizer.decode(rollout.answer_ids[~rollout.own])
        assert f"It is {rollout.row - 1} " in told and told.rstrip().endswith("### Response:")
        assert rollout.score == 2.0 and rollout.length == rollout.own.sum() < len(rollout.answer_ids)
        assert special not in rollout.answer_ids[~rollout.own]  # what the tool says is text
        values = rollout.token_values()["advantage"]
        assert (np.isnan(values) == ~rollout.own).all()
    assert several > 4
    line = ran.folder.read_metrics()[0]
    assert line["ratio"] == pytest.approx(1.0, abs=1e-5) and line["logprob_difference"] < 1e-5


def test_values_returns_and_advantages_go_across_a_turn_of_the_tool(episodes: dict[str, Any], base: Path) -> None:
    """The model's tokens are consecutive: the value after its first turn's last token is that before its second turn,
    which has seen what the tool says. Against the recursion over all tokens, with those of the tool masked."""
    grpo = {key: value for key, value in episodes.pop("grpo").items() if key != "answers"}
    ppo = {**grpo, "prompts": 8, "kl": 0.0, "gamma": 0.9, "lam": 0.8, "whiten": False}
    train = {**episodes["train"], "lr": 1e-12}
    ran = run(base, {**episodes, "task": "ppo", "ppo": ppo, "train": train, "steps": 1})
    language = ran.prepared.task.language
    assert language is not None
    several = [r for r in files_of(ran).read(0).rollouts if r.own is not None]
    assert several
    for r in several:
        ids = torch.from_numpy(np.concatenate((r.prompt_ids, r.answer_ids)).astype(np.int64))
        with torch.no_grad():
            hidden = language.model.base_model(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0]
            values = language.model.value_head(hidden)[len(r.prompt_ids) - 1 :, 0].numpy()
        advantages, following, after = np.full(len(values), np.nan), 0.0, 0.0
        for t in reversed(np.flatnonzero(r.own)):
            reward = r.score if t == len(values) - 1 else 0.0
            after = reward + 0.9 * following - values[t] + 0.9 * 0.8 * after
            advantages[t], following = after, values[t]
        shown = r.token_values()
        np.testing.assert_allclose(r.tokens["value"], values[r.own], atol=1e-5)
        np.testing.assert_allclose(shown["advantage"], advantages, atol=1e-5)
        np.testing.assert_allclose(shown["return"], np.where(r.own, advantages + values, np.nan), atol=1e-5)


def test_a_reply_that_does_not_fit_is_left_out(episodes: dict[str, Any], base: Path) -> None:
    rewards = ["python:tool_of_tests:in_turn", "length:1"]
    grpo = {**episodes["grpo"], "environment": "python:tool_of_tests:long", "rewards": rewards, "turns": 4}
    ran = run(base, {**episodes, "grpo": grpo, "steps": 1})
    rollouts = files_of(ran).read(0).rollouts
    assert max(len(r.prompt_ids) + len(r.answer_ids) for r in rollouts) <= ran.prepared.job.train.seq_len == 64
    left_out = [r for r in rollouts if not r.stopped and r.length < 16]
    assert any(r.own is not None for r in left_out)
    for r in rollouts:
        own = np.ones(len(r.answer_ids), bool) if r.own is None else r.own
        last_turn = len(own) - 1 - np.flatnonzero(~own)[-1] if not own.all() else len(own)
        assert r.rewards == {rewards[0]: 1.0, rewards[1]: pytest.approx(max(0.0, 1.0 - (last_turn - 1)))}


@pytest.mark.slow  # two processes
def test_episodes_under_a_layout_are_those_of_one_process(
    episodes: dict[str, Any], base: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {**episodes["train"], "precision": "fp64", "micro_batch": 2}
    write_job(base, {**episodes, "train": train, "evaluate": {"fraction": 0.2, "every": 3}})
    monkeypatch.syspath_prepend(str(base))
    trained(str(base), "alone", ())
    spread = ("parallel.data=2", "parallel.shard=zero3")
    pool.run(trained, str(base), "spread", spread, world=2, timeout=250)
    check_alike(base, 5, ("loss", "score", "ratio", "response_tokens", "grad_norm"))


def test_episodes_are_shown(
    episodes: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(base, {**episodes, "steps": 1})
    monkeypatch.chdir(base)
    assert main(["rollouts", str(ran.folder.path), "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert any(None in answer["tokens"]["advantage"] for answer in answers)
    assert main(["rollouts", str(ran.folder.path), "--limit", "16"]) == 0
    assert "It is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"environment": "python:tool_of_tests:fails"}, r"asked\.jsonl:\d+: .*fails raised ValueError: no such tool"),
        ({"environment": "python:tool_of_tests:number"}, r"asked\.jsonl:\d+: .*returned what cannot follow an answer"),
        ({"environment": "python:tool_of_tests:missing"}, r"job\.yaml:\d+:\d+: .*has no 'missing'"),
        ({"environment": "tools"}, "names no function; write python:MODULE:FUNCTION"),
        ({"environment": None, "turns": 3}, "without an environment an answer has one turn"),
    ],
)
def test_what_an_environment_does_wrong_is_said(
    change: dict[str, Any], says: str, episodes: dict[str, Any], base: Path
) -> None:
    with pytest.raises(UserError, match=says):
        run(base, {**episodes, "grpo": {**episodes["grpo"], **change}})


def test_a_reply_with_a_token_without_embedding_is_an_error_at_its_row(
    episodes: dict[str, Any], base: Path, tokenizer: Tokenizer
) -> None:
    size = tokenizer.get_vocab_size()
    text = f"Please{tokenizer.decode([size - 1])}"
    smaller = save_tiny_llama(base / "smaller", tokenizer, template=None, vocab_size=size - 1)
    model = {"name": str(smaller), "stop": [each for each in episodes["model"]["stop"] if each not in text]}
    (base / "returns_last.py").write_text(f"def reply(messages, row):\n    return {text!r}\n")
    grpo = {**episodes["grpo"], "environment": "python:returns_last:reply"}
    with pytest.raises(UserError, match=r"asked\.jsonl:\d+: .*:reply returned the token '.+', for which the model has"):
        run(base, {**episodes, "model": model, "grpo": grpo})


def test_an_answer_of_one_turn_is_as_without_an_environment(episodes: dict[str, Any], base: Path) -> None:
    grpo = {**episodes["grpo"], "turns": 1}
    one = run(base, {**episodes, "grpo": grpo, "steps": 1, "output": "one"})
    del grpo["environment"], grpo["turns"]
    grpo["rewards"] = "length:4"
    none = run(base, {**episodes, "grpo": grpo, "steps": 1, "output": "none"})
    assert isinstance(one.prepared.task._collector._environment, Environment)  # type: ignore[attr-defined]
    for a, b in zip(files_of(one).read(0).rollouts, files_of(none).read(0).rollouts, strict=True):
        assert a.answer_ids.tolist() == b.answer_ids.tolist() and a.own is None
