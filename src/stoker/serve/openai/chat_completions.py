"""``/v1/chat/completions``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from stoker.data.templates.chat_template import ChatTemplate, as_template_message
from stoker.data.templates.ignored_fields import lost_fields
from stoker.data.templates.source_template import with_arguments
from stoker.data.templates.template_environment import TemplateRefused
from stoker.generate.request import Token
from stoker.serve.api_error import bad_request
from stoker.serve.endpoint_state import Service, Usage, engine_requests, response_head
from stoker.serve.openai.answer_stream import AnswerStream, Delta
from stoker.serve.openai.chat_body import ChatBody, ChosenTool
from stoker.serve.openai.grammar import ANY_OBJECT, SchemaConstraint
from stoker.serve.openai.sse import DONE, event
from stoker.serve.openai.token_text import clamp_log_probability
from stoker.serve.openai.tool_calls import CallFinder, ForcedCall, ToolCall, forced_schema
from stoker.serve.served_models.served import Served

DEFAULT_TOKENS = 1024  # default length of an answer; less where the context is shorter


@dataclass
class _Choice:
    """State of an answer."""

    finder: CallFinder | ForcedCall | None
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None


class ChatAnswer:
    """Response to one chat request."""

    def __init__(self, service: Service, served: Served, body: ChatBody) -> None:
        self.service, self.served, self.body = service, served, body
        self.usage = Usage(service, served)
        self._head = response_head("chat.completion.chunk" if body.stream else "chat.completion", served, "chatcmpl")
        self._schemas = {tool.function.name: tool.function.arguments for tool in body.tools}
        chosen = body.tool_choice
        self._forced: list[str] = []
        if isinstance(chosen, ChosenTool):
            self._forced = [chosen.function.name]
        elif chosen == "required":
            self._forced = list(self._schemas)
        self._tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if chosen != "none" else []
        self._format = served.tool_format if self._tools and not self._forced else None
        self._choices = [_Choice(self._finder()) for _ in range(body.n)]

    def _finder(self) -> CallFinder | ForcedCall | None:
        if self._forced:
            return ForcedCall()
        return None if self._format is None else CallFinder(self._format, self._schemas)

    @cached_property
    def _template(self) -> ChatTemplate:
        """The model's chat template, with the variables that the request sets."""
        template, given = self.served.opened.codec.template, self.body.chat_template_kwargs
        if not given:
            return template
        known = {name: value for name, value in given.items() if name in self.served.template_arguments}
        return replace(template, source=with_arguments(template.source, known))

    def _prompt(self) -> tuple[list[int], SchemaConstraint | None]:
        """Returns the prompt, and the constraint of the answer."""
        opened, body = self.served.opened, self.body
        if not opened.chats:
            raise bad_request("this model has no chat template; ask /v1/completions", param="model")
        prompt = opened.prompt_ids(
            [as_template_message(turn.message) for turn in body.messages], self._tools or None, self._template
        )
        schema, param = None, "response_format"
        if self._forced:
            schema, param = forced_schema(self._schemas, self._forced), "tools"
        elif body.response_format is not None and body.response_format.type == "json_object":
            schema = ANY_OBJECT
        elif body.response_format is not None and body.response_format.json_schema is not None:
            schema = body.response_format.json_schema.schema_
        stop_ids = opened.codec.stop_ids
        if schema is None:
            return prompt, None
        return prompt, self.served.grammars.of_schema(schema, param=param, stop_ids=stop_ids)

    async def unread(self) -> list[str]:
        """Returns the fields that the chat template does not write into the prompt."""
        return await self.service.in_texts_thread(self._unread)

    def _unread(self) -> list[str]:
        if not self.served.opened.chats:
            return []
        messages = [turn.message for turn in self.body.messages]
        turns, tools = list(map(as_template_message, messages)), self._tools or None
        render = partial(self._template.render, prompt=True)
        try:
            lost = lost_fields(render, render(turns, tools), messages, turns, tools)
        except TemplateRefused:
            return []  # the prompt cannot be rendered either, and its error says why
        names = {name if turn < 0 else f"messages[].{name}" for turn, name in lost.fields}
        unknown = [name for name in self.body.chat_template_kwargs if name not in self.served.template_arguments]
        return sorted(names | ({"chat_template_kwargs"} if unknown else set()))

    async def _answers(self) -> AnswerStream:
        body = self.body
        prompt, constraint = await self.service.in_texts_thread(self._prompt)
        requests = engine_requests(
            body,
            self.served,
            prompt,
            max_tokens=body.max_completion_tokens or body.max_tokens or DEFAULT_TOKENS,
            alternatives=body.top_logprobs,
            remember=True,
            constraint=constraint,
        )
        marks = () if self._format is None else self._format.begin
        answers = AnswerStream(
            self.service.worker,
            self.served,
            requests,
            body.stop,
            skip_special_tokens=not self.served.special_tokens.intersection(marks),
        )
        await answers.begin()
        self.usage.prompt_of(len(prompt))
        return answers

    async def _deltas(self) -> AsyncIterator[tuple[int, str, list[ToolCall], list[Token], str | None]]:
        """Yields the answers' increments: (index, text, calls, tokens, finish reason)."""
        answers = await self._answers()
        try:
            async for delta in answers:
                self.usage.token_came()
                choice = self._choices[delta.index]
                if choice.finish is not None:
                    continue
                text, calls = self._divided(choice, delta)
                finish = delta.finish
                if calls and not self.body.parallel_tool_calls:
                    calls, finish = calls[:1], "stop"
                    answers.cancel(delta.index)
                choice.calls += calls
                if finish is not None:
                    self.usage.answer_of(len(delta.generation.tokens), delta.generation.shared)
                    finish = "tool_calls" if choice.calls and finish == "stop" else finish
                    choice.finish = finish
                yield delta.index, text, calls, [token for _, token in delta.tokens], finish
                if all(choice.finish is not None for choice in self._choices):
                    return
        finally:
            answers.close()

    def _divided(self, choice: _Choice, delta: Delta) -> tuple[str, list[ToolCall]]:
        """Splits a delta into its text and the calls that end in it."""
        if choice.finder is None:
            return delta.text, []
        text, calls = choice.finder.push(delta.text)
        if delta.finish is not None:
            rest, more = choice.finder.finish()
            text, calls = text + rest, calls + more
        return text, calls

    async def whole(self) -> dict[str, Any]:
        """Returns the whole response."""
        async for index, text, _, tokens, _ in self._deltas():
            self._choices[index].text += text
            self._choices[index].tokens += tokens
        found = [self._as_json(index, choice) for index, choice in enumerate(self._choices)]
        return self._head | {"choices": found, "usage": self.usage.as_json()}

    def _as_json(self, index: int, choice: _Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text.strip() or None
            message["tool_calls"] = [call.as_json() for call in choice.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._scores(choice.tokens),
            "finish_reason": choice.finish,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the response as events."""
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        head = self._head | ({"usage": None} if with_usage else {})
        opened: set[int] = set()
        waiting: dict[int, list[Token]] = {}
        async for index, text, calls, tokens, finish in self._deltas():
            if index not in opened:
                opened.add(index)
                yield event(head | {"choices": [_part(index, {"role": "assistant", "content": ""})]})
            waiting.setdefault(index, []).extend(tokens)
            delta: dict[str, Any] = {"content": text} if text else {}
            if calls:
                first = len(self._choices[index].calls) - len(calls)
                delta["tool_calls"] = [call.as_json(first + number) for number, call in enumerate(calls)]
            if delta or (finish is not None and waiting[index] and self.body.logprobs):
                scores = self._scores(waiting.pop(index))
                yield event(head | {"choices": [_part(index, delta, scores)]})
            if finish is not None:
                yield event(head | {"choices": [_part(index, {}, finish=finish)]})
        if with_usage:
            yield event(head | {"choices": [], "usage": self.usage.as_json()})
        yield DONE

    def _scores(self, tokens: list[Token]) -> dict[str, Any] | None:
        """Returns the log-probabilities of tokens, if they were requested."""
        if not self.body.logprobs:
            return None
        content = []
        for token in tokens:
            others = [self._score(number, value) for number, value in token.alternatives]
            content.append(self._score(token.id, token.log_probability) | {"top_logprobs": others})
        return {"content": content, "refusal": None}

    def _score(self, token: int, value: float) -> dict[str, Any]:
        texts = self.served.texts
        return {"token": texts.text(token), "logprob": clamp_log_probability(value), "bytes": list(texts.bytes(token))}


def _part(index: int, delta: dict[str, Any], scores: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}


def check_calls(body: ChatBody) -> None:
    """Rejects tool calls in earlier turns whose arguments are not a JSON object.

    Raises:
        ApiError: the arguments are not a JSON object.
    """
    for place, turn in enumerate(body.messages):
        for number, call in enumerate(turn.tool_calls):
            if isinstance(call.function.arguments, str):
                try:
                    arguments = json.loads(call.function.arguments)
                except (ValueError, RecursionError):
                    arguments = None
                if not isinstance(arguments, dict):
                    where = f"messages[{place}].tool_calls[{number}].function.arguments"
                    raise bad_request(f"`{where}` is not a JSON object", param=where)
