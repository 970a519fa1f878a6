"""Collection of an iteration's answers: sampling, rewards, and per-token scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from stoker.data.sequences import Document
from stoker.data.text_codec import TextCodec
from stoker.errors import CodeFailed
from stoker.models.attention.collate import Inputs, Row
from stoker.models.critic import as_critic
from stoker.scoring.answer_rows import AnswerRow
from stoker.train.language.language_task import HOST, LanguageTask
from stoker.train.rollouts.actor_critic import ValueReading
from stoker.train.rollouts.answer_sampling import Continue, Episode, Prompt, sampled
from stoker.train.rollouts.environment import Environment, Reply, Turns
from stoker.train.rollouts.policy_settings import PolicySettings
from stoker.train.rollouts.prompt_rows import prompt_row
from stoker.train.rollouts.reference_weights import ReferenceWeights
from stoker.train.rollouts.rewards import PolicyAnswer, Rewards
from stoker.train.rollouts.rollout import Rollout
from stoker.train.rollouts.shaping import penalised
from stoker.train.rollouts.token_scores import TokenScoreReading, by_rollout
from stoker.train.task import Part

if TYPE_CHECKING:
    from stoker.train.engine import Engine


class AnswerCollector:
    """Samples answers to prompts on all processes with the current weights, and scores them."""

    def __init__(
        self,
        task: LanguageTask,
        settings: PolicySettings,
        rewards: Rewards,
        codec: TextCodec,
        *,
        context: int,
        seed: int,
        micro_batch: int,
        environment: Environment | None = None,
    ) -> None:
        """
        Args:
            task: its model answers the prompts of its corpus.
            context: most tokens of a prompt with its answer.
            micro_batch: answers per forward pass.
            environment: replies to the model's turns, for answers of several turns.
        """
        self._environment = environment
        self._task, self._settings, self._rewards, self._codec = task, settings, rewards, codec
        self._context, self._seed, self._micro_batch = context, seed, micro_batch
        self._reference: ReferenceWeights | None = None

    def begin(self) -> None:
        """Copies the initial weights, if they are the reference."""
        if self._settings.kl and not isinstance(self._task.model, PeftModel):
            self._reference = ReferenceWeights(self._task.model)

    def answers(
        self, asked: Sequence[tuple[int, Document]], engine: Engine, *, answers: int, temperature: float
    ) -> list[Rollout]:
        """Samples and scores answers to prompts on all processes together; returns the same list on each."""
        decoder = engine.decoder(self._context)
        assert decoder is not None, "the layout has been checked"
        first, last = engine.share(0, len(asked), self._settings.plan.prompts)
        mine = asked[first:last]
        rows = [prompt_row(self._task.corpus, document) for _, document in mine]
        prompts = [
            Prompt(n, np.asarray(document.row.prompt), row.source, row.row)
            for (n, document), row in zip(mine, rows, strict=True)
        ]
        episodes = sampled(
            decoder,
            prompts,
            answers=answers,
            max_tokens=self._settings.max_tokens,
            temperature=temperature,
            stop_ids=self._codec.stop_ids,
            seed=self._seed,
            go_on=self._going_on(rows, mine, engine) if self._environment is not None else None,
        )
        behind = [row for row in rows for _ in range(answers)]
        return engine.gather(lambda: self._scored(episodes, behind))

    def _going_on(self, rows: Sequence[AnswerRow], mine: Sequence[tuple[int, Document]], engine: Engine) -> Continue:
        """Returns a callback to the environment. One process' reply is used on all processes that work on the
        same row.
        """
        behind = {number: (row, document.source) for (number, document), row in zip(mine, rows, strict=True)}
        environment, turn = self._environment, 1
        assert environment is not None
        embedded = self._task.language.model.config.get_text_config().vocab_size

        def asked(episode: Episode) -> tuple[tuple[int, int], Turns, Reply | None]:
            row, source = behind[episode.prompt.number]
            said = self._said(episode)
            reply = environment([*row.turns, *episode.turns, said], row, source)
            if reply is not None and (largest := max(reply.ids, default=0)) >= embedded:
                token = self._codec.tokenizer.id_to_token(largest)
                message = f"{environment.name} returned the token {token!r}, for which the model has no embedding"
                raise CodeFailed(row.problem(message, "remove it from what the function returns"))
            return (episode.prompt.number, episode.number), [said], reply

        def go_on(episodes: Sequence[Episode]) -> Sequence[Reply | None] | None:
            nonlocal turn
            turn += 1
            if turn > environment.turns:
                return None
            found = {key: (said, reply) for key, said, reply in engine.gather(lambda: [asked(e) for e in episodes])}
            if all(reply is None for _, reply in found.values()):
                return None
            following = [found[episode.prompt.number, episode.number] for episode in episodes]
            return [reply and Reply([*said, *reply.turns], reply.ids) for said, reply in following]

        return go_on

    def _said(self, episode: Episode) -> dict[str, Any]:
        text = self._codec.tokenizer.decode(episode.last_turn, skip_special_tokens=True)
        return {"role": "assistant", "content": text}

    def _scored(self, episodes: Sequence[Episode], rows: Sequence[AnswerRow]) -> list[Rollout]:
        rollouts, answers = [episode.rollout() for episode in episodes], []
        for episode, rollout, row in zip(episodes, rollouts, rows, strict=True):
            said, fields = self._said(episode), row.fields
            turns = [*row.turns, *episode.turns, said]
            if self._environment is not None:
                fields = {**fields, "messages": turns}
            answers.append(
                PolicyAnswer(
                    text=said["content"],
                    row=replace(row, fields=fields),
                    prompt_ids=tuple(rollout.prompt_ids.tolist()),
                    ids=tuple(rollout.answer_ids.tolist()),
                    last_turn=len(episode.last_turn),
                    stopped=rollout.stopped,
                    turns=tuple(turns),
                )
            )
        for rollout, parts, score in zip(rollouts, *self._rewards(answers), strict=True):
            rollout.rewards, rollout.score = parts, score
            rollout.score = penalised(rollout, self._settings)
        return rollouts

    @property
    def kind(self) -> type[np.floating]:
        """Type of the log-probabilities of tokens."""
        wide = torch.promote_types(self._task.language.model.dtype, torch.float32)
        return np.float64 if wide == torch.float64 else np.float32

    def score_tokens(self, rollouts: Sequence[Rollout], engine: Engine, *, policy: bool = True) -> None:
        """Adds the log-probabilities of the policy and the reference, from the training forward pass; a collective.

        Args:
            policy: whether to score by the policy; else the passes that train on the answers do, and there is no
                critic.
        """
        if not policy and not self._settings.kl:
            return
        first, last = engine.share(0, len(rollouts), self._settings.plan.rollouts)
        mine, size = rollouts[first:last], self._micro_batch
        starts: list[int] = []  # index in `mine` of the first rollout of each part's micro-batch
        parts: list[Part] = []
        for start in range(0, len(mine), size):
            for inputs in self.laid_out(mine[start : start + size]):
                starts.append(start)
                parts.append(Part(inputs, len(inputs.targets), inputs.tokens))
        passes, moved = engine.count(parts).passes, [part.to(self._task.device) for part in parts]
        columns: list[dict[str, np.ndarray]] = [{} for _ in mine]

        def keep(names: tuple[str, ...], scores_XN: Sequence[Tensor]) -> None:
            for start, part, values_XN in zip(starts, parts, scores_XN, strict=True):
                for number, values in by_rollout(values_XN, part.row).items():
                    columns[start + number] |= zip(names, values, strict=True)

        if policy:
            keep(("old", "entropy"), engine.read(moved, TokenScoreReading(self._settings.temperature), passes))
        if self._settings.kl:
            keep(("reference",), self._reference_scores(moved, engine, passes))
        if self._settings.critic:
            with as_critic(self._task.language):
                keep(("value",), engine.read(moved, ValueReading(self._task.language), passes))
        for rollout, own in zip(rollouts, engine.gather(lambda: columns), strict=True):
            rollout.tokens |= own

    def _reference_scores(self, parts: Sequence[Part], engine: Engine, passes: int) -> list[Tensor]:
        reading = TokenScoreReading(self._settings.temperature, entropy=False)
        if self._reference is None:
            return engine.read(parts, reading, passes, tuned=False)
        with self._reference.in_place():
            return engine.read(parts, reading, passes)

    def laid_out(self, rollouts: Sequence[Rollout]) -> list[Inputs]:
        """Lays rollouts out as rows on the host; `Inputs.given` has their list indices."""
        rows = [_row(rollout) for rollout in rollouts]
        language = self._task.language
        return language.lay_out(rows, HOST, share=not language.dropout, given={"number": np.arange(len(rows))})


def _row(rollout: Rollout) -> Row:
    ids = np.concatenate((rollout.prompt_ids, rollout.answer_ids))
    own = np.ones(len(rollout.answer_ids), bool) if rollout.own is None else rollout.own
    return ids, np.concatenate((np.zeros(len(rollout.prompt_ids), bool), own))
