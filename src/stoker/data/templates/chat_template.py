"""Renders conversations as the model will see them, with the spans of characters that are trained.

The text comes from the tokenizer's own chat template. Answers are found by rendering, not by searching for markers:
the conversation up to an answer, rendered with the generation prompt, is the served model's prompt; the text that the
whole conversation adds to it is the answer that the model learns to write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stoker.data.files.rows import Message
from stoker.data.formats.messages import REASONING, parsed
from stoker.data.templates import template_sandbox
from stoker.data.templates.template_environment import InvalidTemplate, TemplateRefused, compile_template
from stoker.errors import UserError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}"
    "{% else %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
NONE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
BUILT_IN = {"chatml": CHATML, "plain": PLAIN, "none": NONE}
DEFAULT = "plain"  # for a tokenizer without a template: it needs no token that the vocabulary may lack


def as_template_message(message: Message) -> dict[str, Any]:
    """Converts a message to the format of chat templates: reasoning under its names, arguments as objects."""
    as_read: dict[str, Any] = {"role": message.role, "content": message.content}
    if not message.extra:
        return as_read
    as_read |= {name: value for name, value in message.extra.items() if name not in as_read}
    reasoning = next((as_read[name] for name in REASONING if as_read.get(name) is not None), None)
    if reasoning is not None:
        as_read = {"thinking": reasoning, **as_read, "reasoning_content": reasoning}
    if isinstance(as_read.get("tool_calls"), list):
        as_read["tool_calls"] = [_with_arguments(call) for call in as_read["tool_calls"]]
    return as_read


def _with_arguments(call: Any) -> Any:
    """Returns a tool call with its arguments parsed, if they are a JSON object in a string."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    found = parsed(arguments)
    return {**call, "function": {**function, "arguments": found}} if isinstance(found, dict) else call


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    Attributes:
        text: the whole text, as the template writes it.
        spans: (start, end) in characters of each trained answer, its stop token included.
        exact_prefix: whether every answer's prompt, as it will be served, is a prefix of the whole.
        separated: the text for `stoker.data.templates.special_text.SpecialText.encoder`, where content holds special
            tokens that are to be encoded as text. It has the same length.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    exact_prefix: bool
    separated: str | None = None

    @property
    def written(self) -> str:
        """The text that is encoded."""
        return self.text if self.separated is None else self.separated


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the special tokens it may name (``bos_token``, ``eos_token`` ...)."""

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()

    @cached_property
    def _names(self) -> dict[str, str]:
        return dict(self.special_tokens)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        prompt: bool = False,
    ) -> str:
        """Renders the messages; with ``prompt``, up to the start of the model's answer.

        Raises:
            TemplateRefused: when the template raises on this conversation.
            UserError: it takes too much time or memory.
        """
        if not template_sandbox.in_template_process() and self.source not in BUILT_IN.values():
            return template_sandbox.render(self, messages, tools, prompt=prompt)
        most = template_sandbox.charge_render_time(messages, tools) if template_sandbox.in_template_process() else None
        template = compile_template(self.source)
        given = {
            **self._names,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        try:
            text = template.render(given)
        except (TemplateRefused, MemoryError):
            raise
        except Exception as error:  # templates are foreign programs: they may raise anything
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error
        if most is not None and len(text) > most:
            template_sandbox.abort_render(
                f"writes {len(text):,} characters, which is more than {most:,} for this conversation"
            )
        try:
            text.encode()  # no content has half a surrogate pair, and no tokenizer takes one
        except UnicodeEncodeError as error:
            raise InvalidTemplate("the chat template writes half a surrogate pair") from error
        return text

    def render_placeholders(self) -> str:
        """Returns a conversation without any content of its own; empty if the template takes none."""
        turns = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
        for given in (turns, turns[1:]):
            with suppress(TemplateRefused, UserError):
                return self.render(given, prompt=True)
        return ""

    def render_trained(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        train_on: str = "all",
        silent: Collection[int] = (),
    ) -> Rendered:
        """Renders the conversation and finds the spans of its answers.

        Args:
            messages: role, content and other fields that the template reads; the last one is the assistant's.
            tools: JSON schemas of the functions the model may call.
            train_on: ``all`` the assistant's turns, the ``last`` one, or ``everything``.
            silent: turns that are not trained, of any role.

        Raises:
            TemplateRefused: when the template raises, or writes nothing for an answer.
        """
        text = self.render(messages, tools)
        if train_on == "everything":
            return Rendered(text, self._but_for(text, messages, tools, sorted(silent)), True)
        answers = answers_in(messages, train_on, silent)
        spans, exact = [], True
        for i in answers:
            start, prompted = self._answer_start(text, messages, i, tools)
            exact = exact and prompted
            end = self._answer_end(text, messages, i, tools)
            if end <= start:
                raise TemplateRefused(f"the template writes nothing for the answer in turn {i + 1}")
            spans.append((start, end))
        return Rendered(text, tuple(spans), exact)

    def _answer_start(
        self, text: str, messages: Sequence[dict[str, Any]], i: int, tools: Sequence[dict[str, Any]] | None
    ) -> tuple[int, bool]:
        """Finds the start of turn i's answer, and whether all before it is the prompt as it will be served.

        A greeting before the user's first turn is served after no such prompt: templates refuse an empty conversation,
        or write a system prompt of their own only before a first turn. Renderings with another content show where it
        starts.
        """
        greeting = all(message["role"] != "user" for message in messages[:i])
        try:
            asked = self.render(messages[:i], tools, prompt=True)
        except TemplateRefused:
            if not greeting:
                raise
            asked = None
        start = _common_prefix(asked or "", text)
        exact = asked is not None and start == len(asked)
        if greeting and not exact:
            without = {name: value for name, value in messages[i].items() if name not in REASONING}
            first = str(messages[i]["content"]).strip()[:1]
            other = {**without, "content": "y" if first == "x" else "x"}
            start = _common_prefix(text, self.render([*messages[:i], other, *messages[i + 1 :]], tools))
        return start, exact

    def _but_for(
        self,
        text: str,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        silent: Sequence[int],
    ) -> tuple[tuple[int, int], ...]:
        """Returns the text without these turns; the role's mark of an assistant's turn stays."""
        bounds = [0]
        for i in silent:
            try:
                before = self.render(messages[:i], tools, prompt=messages[i]["role"] == "assistant")
            except TemplateRefused:  # such a conversation has no beginning
                before = ""
            bounds += [_common_prefix(before, text), self._answer_end(text, messages, i, tools)]
        bounds.append(len(text))
        return tuple((start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=True) if start < end)

    def _answer_end(
        self, text: str, messages: Sequence[dict[str, Any]], i: int, tools: Sequence[dict[str, Any]] | None
    ) -> int:
        """Finds the end of turn i's answer: the end of the text of the turns up to it, where that is a prefix of the
        whole.

        Some templates write a turn differently when others follow (they drop its thinking). Then renderings with one
        more character in the answer show where its content ends, in the whole and in the turns up to it; what follows
        the content in the latter closes the turn in the former too.
        """
        if i == len(messages) - 1:
            return len(text)
        turns = list(messages[: i + 1])
        until = self.render(turns, tools)
        if text.startswith(until):
            return len(until)
        longer = {**messages[i], "content": f"{messages[i]['content']}\x00"}
        closing = until[_common_prefix(until, self.render([*turns[:-1], longer], tools)) :]
        end = _common_prefix(text, self.render([*turns[:-1], longer, *messages[i + 1 :]], tools))
        return end + len(closing) if text.startswith(closing, end) else end


def answers_in(messages: Sequence[Mapping[str, Any]], train_on: str, silent: Collection[int]) -> list[int]:
    """Returns the turns that are trained; arguments as of `ChatTemplate.render_trained`."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [i for i in (answers[-1:] if train_on == "last" else answers) if i not in silent]


def _common_prefix(a: str, b: str) -> int:
    """Returns the length of the common beginning of two texts."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit  # a[:low] == b[:low] and a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle
    return low
