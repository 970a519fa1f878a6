"""The served models, by name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.data.templates import template_sandbox
from stoker.errors import UserError
from stoker.generate.generation_engine import GenerationEngine, prompt_too_long
from stoker.generate.open_model import OpenModel
from stoker.job.load_job import LoadedJob
from stoker.serve.api_error import bad_request, model_not_found, of_user_error
from stoker.serve.openai.grammar import Grammars
from stoker.serve.openai.token_text import TokenTexts
from stoker.serve.openai.tool_calls import ToolFormat, tool_format_of
from stoker.train.preference.answer_scores import AnswerScores

LONGEST_ID = 20  # characters of an id in an error


@dataclass(eq=False)
class ServedBase:
    """A base in memory with its engine; several served models share it.

    Attributes:
        base: name of the base.
        opened: the base with its own tokenizer and chat template, or those of the run that opened it.
        run: the job of the run that opened it, whose base fits adapters of other runs; None without a run.
    """

    engine: GenerationEngine
    base: str
    opened: OpenModel
    run: LoadedJob | None = None
    _loaded: int = 0

    def next_number(self) -> int:
        """Returns a number that no adapter of this host had before."""
        self._loaded += 1
        return self._loaded

    @cached_property
    def vocabulary(self) -> int:
        """Token ids that are valid both as inputs and as outputs."""
        model: Any = self.engine.decoder.language.model
        rows = int(model.get_input_embeddings().weight.shape[0])
        return min(rows, int(getattr(model.config.get_text_config(), "vocab_size", rows)))


@dataclass(eq=False)
class Served:
    """A served model.

    Attributes:
        adapter: adapter of its engine requests: a name in memory, ``BASE``, or None.
        opened: its tokenizer, chat template and stop tokens.
        root: where it was loaded from.
        parent: name of the base, for an adapter.
        removable: whether it is an adapter that can be unloaded while its base stays.
        scores: scorer of a reward model, which generates no answers.
        scores_whole_text: whether the score is that at the last token of the text, and not at the stop token.
        users: number of current requests.
    """

    name: str
    host: ServedBase
    adapter: str | None
    opened: OpenModel
    root: str
    parent: str | None = None
    removable: bool = False
    scores: AnswerScores | None = None
    scores_whole_text: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    users: int = 0

    @cached_property
    def texts(self) -> TokenTexts:
        """Texts of its tokens."""
        return TokenTexts(self.opened.codec)

    @cached_property
    def grammars(self) -> Grammars:
        """Constraints over its tokens."""
        return Grammars(self.opened.codec, vocabulary=self.host.vocabulary)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """Format of tool calls; None if the chat template has no known one."""
        return tool_format_of(self.opened.codec.template.source)

    @cached_property
    def template_arguments(self) -> frozenset[str]:
        """Variables of the chat template that a request can set."""
        return frozenset(template_sandbox.arguments_of(self.opened.codec.template.source))

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """Special tokens, which are omitted from answers."""
        added = self.opened.tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        """Rejects ids outside of the vocabulary, which would fail the whole pass."""
        highest, vocabulary = max(ids, default=0), self.host.vocabulary
        if highest >= vocabulary:
            shown = str(highest) if highest < 10**LONGEST_ID else f"{str(highest)[:LONGEST_ID]}..."
            raise bad_request(f"there is no token {shown}: the vocabulary has {vocabulary:,}", param=param)

    def check_length(self, tokens: int, *, param: str) -> None:
        """Rejects a prompt that is longer than the context, before any work that grows with it."""
        context = self.host.engine.context
        if context is not None and tokens > context + 1:  # the engine knows whether an answer follows the last two
            raise of_user_error(UserError(prompt_too_long(tokens, context)), param=param)

    def as_json(self) -> dict[str, Any]:
        """Returns the model's entry in ``/v1/models``."""
        listed = {"id": self.name, "object": "model", "created": self.created, "owned_by": "stoker"}
        limit = self.host.engine.context
        scores = {"scores": True} if self.scores is not None else {}
        return listed | {"root": self.root, "parent": self.parent, "max_model_len": limit} | scores


class Models:
    """The served models, in the given order.

    Attributes:
        folder: start of relative paths in their jobs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._by_name: dict[str, Served] = {}
        self._hosts: list[ServedBase] = []

    def __iter__(self) -> Iterator[Served]:
        return iter(list(self._by_name.values()))

    @property
    def hosts(self) -> list[ServedBase]:
        """The bases in memory; they stay when their last adapter is removed."""
        return list(self._hosts)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def add(self, served: Served) -> None:
        """Adds a model.

        Raises:
            UserError: the name is taken.
        """
        if served.name in self._by_name:
            raise UserError(f"two models would be served as {served.name!r}; write NAME={served.root} for one of them")
        self._by_name[served.name] = served
        if served.host not in self._hosts:
            self._hosts.append(served.host)

    def remove(self, name: str) -> None:
        """Removes a model."""
        del self._by_name[name]

    def find(self, name: str) -> Served:
        """Finds a model by its name.

        Raises:
            ApiError: there is no such model.
        """
        if name not in self._by_name:
            raise model_not_found(name, self._by_name)
        return self._by_name[name]
