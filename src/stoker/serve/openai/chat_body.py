"""The body of a chat request: turns, tools and the format of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from stoker.data.files.rows import Message
from stoker.serve.openai.sampling_fields import MOST_ALTERNATIVES, SamplingFields
from stoker.serve.request_body import Body, LenientBody


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""
    refusal: str = ""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"a part of type {kind[:40]!r}: models here read text only")
        return given


class CalledFunction(Body):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] = "{}"


FUNCTIONS_ONLY = "tools here are functions: write a custom tool as a function with one parameter of type string"


class FunctionKind(Body):
    """Base of what is of type ``function`` in requests."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "custom":
            raise ValueError(FUNCTIONS_ONLY)
        return given


class ToolCallTurn(FunctionKind):
    """A tool call in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Turn(LenientBody):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: list[TextPart] = Field(default_factory=list)
    name: str | None = None
    tool_calls: list[ToolCallTurn] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # part of answers that a client sends back unchanged

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, given: Any) -> Any:
        if isinstance(given, str):
            return [{"type": "text", "text": given}]
        if not isinstance(given, list):
            raise ValueError("write a text, or a list of parts with their type")
        return given

    @property
    def message(self) -> Message:
        """The turn as rows of data have it."""
        extra: dict[str, Any] = {}
        if self.tool_calls:
            extra["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                extra[name] = getattr(self, name)
        text = "".join(part.text or part.refusal for part in self.content)
        return Message("system" if self.role == "developer" else self.role, text, extra=extra)


NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolFunction(Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(pattern=r"^[\w.:-]{1,128}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The JSON schema of its arguments; as in OpenAI's API it takes none without ``parameters``."""
        return self.parameters if "parameters" in self.model_fields_set else NO_ARGUMENTS


class Tool(FunctionKind):
    """A tool that the model may call."""

    function: ToolFunction


class ChosenFunction(Body):
    """The name of a function."""

    name: str


class ChosenTool(FunctionKind):
    """The one tool that the answer must call."""

    function: ChosenFunction


class NamedSchema(Body):
    """A JSON schema for the answer."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(LenientBody):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with type json_schema, and only with it")
        return self


TemplateValue = bool | int | float | Annotated[str, Field(max_length=1000)]


class ChatBody(SamplingFields):
    """The body of ``/v1/chat/completions``."""

    parts: ClassVar[Mapping[str, type[Body]]] = {
        **SamplingFields.parts,
        "messages": Turn,
        "tools": Tool,
        "response_format": ResponseFormat,
    }

    messages: list[Turn] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_ALTERNATIVES)
    tools: list[Tool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, TemplateValue] = Field(default_factory=dict, max_length=16)
    modalities: list[Literal["text"]] = Field(default_factory=list)

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _allowed(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind == "allowed_tools":
            raise ValueError(
                "allowed_tools is not supported: leave the others out of `tools`, and write auto or required"
            )
        if kind == "custom":
            raise ValueError(FUNCTIONS_ONLY)
        return given

    @model_validator(mode="after")
    def _possible(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is given, but logprobs is not true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among the tools")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice is required, but there are no tools")
        may_call = self.tools and self.tool_choice != "none"
        if may_call and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("response_format and tools exclude each other: write tool_choice none, or leave one out")
        return self
