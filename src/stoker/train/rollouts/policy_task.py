"""Policy task: samples are the policy's own answers to a corpus' prompts, sampled before the steps that train
on them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from stoker.checkpoint.object_collectives import by_first
from stoker.data.sequences import Document
from stoker.data.text_codec import TextCodec
from stoker.errors import Problem, UserError
from stoker.models.critic import as_critic, is_of_critic
from stoker.parallel.offload.idle_offload import IdleOffload
from stoker.runs.run_folder import RunFolder
from stoker.train.evaluate import Evaluation
from stoker.train.hooks import Hook
from stoker.train.language.language_task import LanguageTask
from stoker.train.rollouts.actor_critic import RETURN, ActorCritic
from stoker.train.rollouts.answer_collector import AnswerCollector
from stoker.train.rollouts.environment import Environment
from stoker.train.rollouts.iteration_plan import IterationPlan
from stoker.train.rollouts.policy_objective import PTX, PolicyObjective
from stoker.train.rollouts.policy_passes import critic_pass, empty_pass, kind_of, policy_pass
from stoker.train.rollouts.policy_settings import PolicySettings
from stoker.train.rollouts.pretraining_mix import PretrainingMix
from stoker.train.rollouts.rewards import Rewards
from stoker.train.rollouts.rollout import Rollout
from stoker.train.rollouts.rollout_figures import NewAlarms, figures_of, ratio_alarms, reward_figures
from stoker.train.rollouts.rollout_files import ROLLOUTS, Iteration, RolloutFiles
from stoker.train.rollouts.shaping import add_advantages, groups, tells_apart
from stoker.train.rollouts.token_scores import TrainedScores
from stoker.train.task import Part

if TYPE_CHECKING:
    from stoker.train.engine import Engine


class PolicyTask(LanguageTask):
    """Task whose samples are answers; see `stoker.train.rollouts.iteration_plan`."""

    lays_out_ahead = False

    def __init__(
        self,
        *arguments: Any,
        settings: PolicySettings,
        rewards: Rewards,
        mix: PretrainingMix | None = None,
        codec: TextCodec,
        context: int,
        seed: int,
        micro_batch: int,
        environment: Environment | None = None,
        **more: Any,
    ) -> None:
        """
        Args:
            arguments, more: arguments of `LanguageTask`.
            mix: other data that the policy is trained on.
            context: most tokens of a prompt with its answer.
            micro_batch: answers per forward pass.
            environment: replies to the model's turns.
        """
        super().__init__(*arguments, **more)
        objective = more.get("objective")
        if isinstance(objective, ActorCritic):
            if self.language.head is None and self.language.critic is None:
                message = f"{type(self.language.model).__name__} has no plain output layer, so it cannot have a critic"
                raise UserError(Problem(message, "take task grpo, which has no critic"))
            objective.language = self.language
        self.settings, self._mix = settings, mix
        self._collector = AnswerCollector(
            self, settings, rewards, codec, context=context, seed=seed, micro_batch=micro_batch, environment=environment
        )
        self._idle = IdleOffload(lambda: ())  # used while answers are sampled
        self._optimizer: Optimizer | None = None
        self._files: RolloutFiles | None = None
        self._iterations: dict[int, Iteration] = {}
        self._prompts: int | None = None  # prompts of the run, where its length is a number of epochs
        self._alarms = NewAlarms(settings, lambda: by_first(lambda: self.files.read(self.files.numbers()[0]).figures))
        self._is_noted = False  # whether the alarm of `_gains_nothing` has been raised
        self._step = 0
        self._only_critic = False  # whether this is the critic's warm-up
        self._untouched = False  # whether no step has been taken on the current answers
        self._trained = objective.trained if isinstance(objective, PolicyObjective) else TrainedScores()
        self._unscored: int | None = None  # number of the iteration that the passes of its step score

    @property
    def plan(self) -> IterationPlan:
        return self.settings.plan

    def epoch_samples(self, epochs: float) -> int:
        self._prompts = self.corpus.sequences.total(epochs)
        return self.plan.total(self._prompts)

    def begin(self, engine: Engine, folder: RunFolder, optimizer: Optimizer) -> None:
        super().begin(engine, folder, optimizer)
        self._optimizer = optimizer
        if self.settings.offload_idle:
            critic = self.language.critic
            own = list(critic.language.model.parameters()) if critic else []
            self._idle = IdleOffload(lambda: [*_states(optimizer), *own])
        self._files = RolloutFiles(folder.path / ROLLOUTS)
        self._collector.begin()

    @property
    def files(self) -> RolloutFiles:
        assert self._files is not None
        return self._files

    def reach(self, first: int, last: int, step: int, engine: Engine) -> list[str]:
        """Samples the answers of the iterations that a step needs, if they do not exist yet.

        After a restart in the middle of an iteration, its answers are read from the run's folder. `figures` are the
        means over the answers of the last iteration; they have seconds only in the step that sampled them.

        Returns:
            Alarms about the answers.
        """
        (begin, place), (end, _) = self.plan.place(first), self.plan.place(last - 1)
        self._only_critic = begin < self.settings.critic_warmup
        before = self._iterations if step >= self._step else {}  # else training went back: answers sampled later go
        self._step = step
        self._iterations = {number: it for number, it in before.items() if begin <= number <= end}
        self._unscored = self._unscored if self._unscored in self._iterations else None
        found = self._gains_nothing()
        for number in range(begin, end + 1):
            if number not in self._iterations and number == begin and place > 0:
                restored = self._restored(number, place)
                if restored.step <= step:
                    self._iterations[number], self._untouched = restored, False
            if number in self._iterations:
                self.figures = {**self._iterations[number].figures, "rollout_seconds": 0.0}
                continue
            self._untouched = True
            unscored = self._scored_within(number, first, last)
            self._unscored = number if unscored else None
            iteration = self._sample(number, step, engine, scored=not unscored)
            if not unscored:
                found += self._complete(iteration)
        return found

    def _gains_nothing(self) -> list[str]:
        if self._is_noted or not self.settings.offload_idle or self.device.type != "cpu":
            return []
        self._is_noted = True
        return ["`offload_idle` frees memory of a GPU; on a CPU it only takes time"]

    def _restored(self, number: int, place: int) -> Iteration:
        """Reads an iteration that a run resumes within. A collective."""
        # Read by the process that has written it: storage may show a new file to other nodes later.
        iteration = by_first(lambda: self.files.read(number))
        if place >= len(iteration.rollouts) * self.plan.epochs:
            raise UserError(
                Problem(
                    "this run ended with a round of fewer prompts, as its epochs were over, so it cannot go on to more",
                    "train further from its weights in a run of its own: export it, and name that folder as the model",
                )
            )
        return iteration

    def _scored_within(self, number: int, first: int, last: int) -> bool:
        """Returns whether the passes of the step on samples first .. last-1 score an iteration, so that no passes
        before it need to.
        """
        begin = number * self.plan.samples
        whole = first <= begin and begin + self.plan.samples <= last
        return whole and self.settings.scores_in_training and not self.language.dropout

    def after_passes(self, engine: Engine) -> list[str]:
        found, number = self._trained.take(), self._unscored
        if number is None:
            return []
        iteration = self._iterations[number]
        for index, (old, entropy) in engine.gather(lambda: list(found.items())):
            iteration.rollouts[index].tokens |= {"old": old, "entropy": entropy}
        return self._complete(iteration)

    def _complete(self, iteration: Iteration) -> list[str]:
        """Writes an iteration whose answers have all of their values; returns alarms about it. A collective."""
        iteration = replace(iteration, figures={**iteration.figures, **figures_of(iteration.rollouts)})
        self._iterations[iteration.number], self.figures = iteration, iteration.figures
        by_first(lambda: self.files.write(iteration))
        return self._alarms.about(iteration.figures)

    def judge(self, measures: Mapping[str, float]) -> list[str]:
        """Checks, before the first step on new answers, that the trained policy equals the one that sampled them."""
        first, self._untouched = self._untouched, False
        return ratio_alarms(measures) if first and not self._only_critic else []

    @property
    def hooks(self) -> tuple[Hook, ...]:
        return (Hook(after_passes=self._keep_policy),) if self.settings.critic_warmup else ()

    def _keep_policy(self, step: int, loss: Tensor) -> Tensor:
        """Drops the policy's gradients in the critic's warm-up, so that no optimizer steps or decays its weights."""
        for name, parameter in self.model.named_parameters() if self._only_critic else ():
            if not is_of_critic(name):
                parameter.grad = None
        return loss

    def parts(self, first: int, last: int) -> list[Part]:
        """Returns the policy's passes over answers, those over other data, and the critic's."""
        beside = self._mix.parts(self, first, last) if self._mix is not None and not self._only_critic else []
        found: list[Rollout] = []
        numbers: list[int] = []  # indices within their iterations
        while first < last:
            number, place = self.plan.place(first)
            end = min(last, first - place + self.plan.samples)
            rollouts = self._iterations[number].rollouts
            chosen = self.plan.chosen(first, end, len(rollouts))
            found += [rollouts[i] for i in chosen]
            numbers += chosen
            first = end
        laid_out = self._collector.laid_out(found)
        policy = [
            policy_pass(inputs, found, numbers, self.settings, scored=self._unscored is None, idle=self._only_critic)
            for inputs in laid_out
        ]
        own = self.language.critic is not None
        critic = [critic_pass(inputs, found, self.settings, own=own) for inputs in laid_out if self.settings.critic]
        return policy + beside + critic

    def complete(self, parts: Sequence[Part], engine: Engine, passes: int) -> Sequence[Part]:
        """Pads the passes of each kind to the number of the other processes, as sharded weights need matching
        passes.
        """
        kinds: dict[str, list[Part]] = {"": [], **({PTX: []} if self._mix else {})}
        kinds |= {RETURN: []} if self.settings.critic else {}
        if len(kinds) == 1:
            return parts
        for part in parts:
            kinds[kind_of(part)].append(part)
        targets = engine.count(parts).targets
        if self._mix is not None:
            kinds[PTX] = self._mix.scaled(kinds[PTX], engine, targets)
        found: list[Part] = []
        for kind, own in kinds.items():
            missing = engine.count(own).passes - len(own)
            found += own + [empty_pass(self.nothing(), kind, own_critic=self.language.critic is not None)] * missing
        return found

    @contextmanager
    def around(self, part: Part) -> Iterator[None]:
        with super().around(part), as_critic(self.language) if kind_of(part) == RETURN else nullcontext():
            yield

    def describe_samples(self, first: int, last: int) -> list[str]:
        numbers = sorted({self.plan.place(sample)[0] for sample in range(first, last)})
        kept = [r for number in numbers if number in self._iterations for r in self._iterations[number].rollouts]
        return list(dict.fromkeys(f"{r.source}:{r.row}" for r in kept))

    def _sample(self, number: int, step: int, engine: Engine, *, scored: bool) -> Iteration:
        """Samples the answers of an iteration and computes everything that its steps need; a collective.

        Args:
            scored: whether their tokens are scored by the policy; else the passes of the step do that.
        """
        began, settings = time.perf_counter(), self.settings
        first = number * self.plan.prompts if settings.dynamic == 1 or not number else self._before(number)[0]
        kept: list[Rollout] = []
        informative: list[bool] = []
        for rounds_left in reversed(range(settings.dynamic)):
            wanted = self.plan.prompts - len(kept) // self.plan.answers
            last = first + wanted if self._prompts is None else min(first + wanted, self._prompts)
            asked = [(n, self.corpus.sequences[n][0]) for n in range(first, last)]
            found = self._answers(asked, engine, answers=self.plan.answers, temperature=settings.temperature)
            first = last
            for group in groups(found):
                informative.append(tells_apart(group))
                if informative[-1] or not rounds_left:
                    kept += group
            if len(kept) == self.plan.rollouts or first == self._prompts:
                break
        self._collector.score_tokens(kept, engine, policy=scored)
        kl = self._kl_factor(number)
        add_advantages(kept, settings, kl, self._collector.kind)
        figures = {"rollout_seconds": time.perf_counter() - began}
        if settings.in_groups:
            figures["informative"] = float(np.mean(informative))
        if settings.kl_target is not None:
            figures["kl_factor"] = kl
        if settings.kl and settings.kl_in_reward:
            figures |= reward_figures(kept, kl)
        iteration = self._iterations[number] = Iteration(number, step, first, tuple(kept), figures)
        return iteration

    def _answers(self, asked: Sequence[tuple[int, Document]], engine: Engine, **how: Any) -> list[Rollout]:
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)  # the memory of the last step's gradients is for the answers
        with self._idle.away():
            return self._collector.answers(asked, engine, **how)

    def _before(self, number: int) -> tuple[int, Mapping[str, float], int]:
        """Returns (next prompt, figures, number of rollouts) of the previous iteration. A collective."""
        before = self._iterations.get(number - 1)
        return _ending(before) if before else by_first(lambda: _ending(self.files.read(number - 1)))

    def _kl_factor(self, number: int) -> float:
        """Returns the KL factor of an iteration, adapted from the previous iteration's factor and KL."""
        settings = self.settings
        if settings.kl_target is None or not number:
            return settings.kl
        _, figures, rollouts = self._before(number)
        off = min(0.2, max(-0.2, figures["kl"] / settings.kl_target - 1))
        return figures["kl_factor"] * (1 + off * rollouts / settings.kl_horizon)

    def evaluate(self, engine: Engine) -> Evaluation | None:
        """Evaluates the mean score of greedy answers to the held-out prompts; the loss is its negative."""
        documents = self.corpus.evaluation_documents()
        if not documents:
            return None
        rollouts: list[Rollout] = []
        for first in range(0, len(documents), self.plan.prompts):
            asked = list(enumerate(documents[first : first + self.plan.prompts], first))
            rollouts += self._answers(asked, engine, answers=1, temperature=0.0)
        score = float(np.mean([rollout.score for rollout in rollouts]))
        measures = {
            "score": score,
            "response_tokens": float(np.mean([rollout.length for rollout in rollouts])),
            "ended": float(np.mean([rollout.stopped for rollout in rollouts])),
        }
        return Evaluation(0.0 - score, None, len(rollouts), "answer", None, measures)  # of 0 it is not -0


def _ending(iteration: Iteration) -> tuple[int, Mapping[str, float], int]:
    """Returns what the next iteration needs: (next prompt, figures, number of rollouts)."""
    return iteration.next_prompt, iteration.figures, len(iteration.rollouts)


def _states(optimizer: Optimizer) -> list[Tensor]:
    """Returns the optimizer's state tensors."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
