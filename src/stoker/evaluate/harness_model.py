"""Stoker's engine as a model of lm-evaluation-harness.

Texts are encoded as `lm_eval.models.huggingface.HFLM` encodes them, so that both give the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from stoker.errors import UserError
from stoker.evaluate.ask_model import AskSettings
from stoker.generate.answer_text import answer_all
from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.open_model import OpenModel
from stoker.generate.request import Request, Sampling

AT_ONCE = 256  # requests whose tokens are in memory at a time
UNLIMITED = 2048  # tokens of a window where the model states no context length, as in HFLM

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class HarnessModel(TemplateLM):
    """Log-likelihoods and answers for lm-evaluation-harness."""

    def __init__(self, model: OpenModel, settings: AskSettings) -> None:
        super().__init__()
        self._model, self._settings = model, settings
        self._engine: GenerationEngine = model.engine()
        names = dict(model.codec.template.special_tokens)
        ids = {name: model.tokenizer.token_to_id(text) for name, text in names.items()}
        self._bos, self._eos = ids.get("bos_token"), ids.get("eos_token")

    @property
    def max_length(self) -> int:
        """Most tokens of a text that the model scores after the first one."""
        context = self._model.decoder.context
        return UNLIMITED if context is None else context

    @property
    def eot_token_id(self) -> int:
        stop = self._eos if self._eos is not None else min(self._model.codec.stop_ids, default=None)
        if stop is None:
            raise UserError(f"{self._model.name} has no token that ends a text, which tasks need")
        return int(stop)

    @property
    def prefix_token_id(self) -> int:
        return self._bos if self._bos is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return self._model.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._model.codec.template.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self._model.codec.template.render(chat_history, prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            prefix = self._model.tokenizer.id_to_token(self.prefix_token_id)
            add_special_tokens = prefix is None or not string.startswith(prefix)
        ids: list[int] = self._model.tokenizer.encode(string, add_special_tokens=add_special_tokens).ids
        return ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation after its context, and whether greedy decoding gives it."""
        found: list[tuple[float, bool]] = []
        for first in range(0, len(requests), AT_ONCE):
            part = [(context, after) for _, context, after in requests[first : first + AT_ONCE]]
            generations = self._engine.run([self._scoring(context, after) for context, after in part])
            for generation, (_context, after) in zip(generations, part, strict=True):
                scored = generation.scored[-len(after) :] if after else []
                greedy = all(token.alternatives[0][0] == token.id for token in scored)
                found.append((sum(token.log_probability for token in scored), greedy))
        return found

    def _scoring(self, context: list[int], after: list[int]) -> Request:
        ids = tuple([*context, *after][-self.max_length - 1 :])
        return Request(ids, 0, alternatives=1, score_prompt=True, score_from=max(1, len(ids) - len(after)))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for instance in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(instance.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers: dict[int, str] = {}
        for stop, group in self._grouped(requests):
            generations = answer_all(self._engine, self._model.tokenizer, [request for _, request in group], stop)
            answers |= {number: answer.text for (number, _), answer in zip(group, generations, strict=True)}
        return [answers[number] for number in range(len(requests))]

    def _grouped(self, requests: Sequence[Instance]) -> Iterator[tuple[list[str], list[tuple[int, Request]]]]:
        """Groups requests by their stop strings, each with its number."""
        groups: dict[tuple[str, ...], list[tuple[int, Request]]] = {}
        for number, instance in enumerate(requests):
            context, options = instance.args
            until = options.get("until") or []
            stop = (until,) if isinstance(until, str) else tuple(until)
            groups.setdefault(stop, []).append((number, self._request(number, context, dict(options))))
        for stop, group in groups.items():
            yield list(stop), group

    def _request(self, number: int, context: str, options: dict[str, Any]) -> Request:
        options.pop("until", None)
        lengths = [options.pop(name) for name in LENGTHS if name in options]
        most = int(lengths[0]) if lengths else self._settings.max_tokens
        drawn = options.pop("do_sample", options.get("temperature", 0) > 0)
        sampling: dict[str, Any] = {name: options.pop(name) for name in SAMPLING if name in options}
        if options.get("num_beams") == 1:
            del options["num_beams"]
        if options:
            raise UserError(f"a task sets {', '.join(options)} for its answers, which Stoker's engine does not have")
        if not drawn:
            penalty = {name: value for name, value in sampling.items() if name == "repetition_penalty"}
            sampling = {**penalty, "temperature": self._settings.temperature}
        ids = self.tok_encode(context)
        room = self.max_length - most
        if room < 1:
            raise UserError(
                f"a task asks for answers of {most} tokens; {self._model.name} takes {self.max_length} in all"
            )
        return Request(
            tuple(ids[-room:]) or (self.prefix_token_id,),
            most,
            Sampling(seed=self._settings.seed + number, **sampling),
            self._model.codec.stop_ids | {self.eot_token_id},
        )
