"""Request bodies: OpenAI's fields, and the sampling fields that vLLM and llama.cpp added.

Unknown fields are rejected. Fields without effect on the answer are ignored, and named in the response header
``x-stoker-ignored``.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from stoker.serve.api_error import wrong

MOST_ALTERNATIVES = 20
MOST_STOPS = 16
SHORTEST = 1e-4  # temperatures below this count as 0: the divided logits would overflow

IGNORED = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "moderation",
    }
)
"""Fields of OpenAI's API without effect here."""

REFUSED = {
    "functions": "write `tools`",
    "function_call": "write `tool_choice`",
    "audio": "models here write text only",
    "web_search_options": "nothing here searches the web",
    "suffix": "models here continue a prompt at its end only",
}
"""Unsupported fields of OpenAI's API, with what to do instead."""


class Body(BaseModel):
    """Base of bodies and their parts: no unknown fields, no type conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        """Drops null values, which OpenAI's clients write for missing fields."""
        if isinstance(given, dict):
            return {key: value for key, value in given.items() if value is not None or key not in cls.model_fields}
        return given


class StreamOptions(Body):
    """Options of a stream; ``include_obfuscation`` has no effect."""

    include_usage: bool = False
    include_obfuscation: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=256)]


class SamplingFields(Body):
    """Fields that chat completions and completions share."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=1_000_000)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.1, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    n: int = Field(1, ge=1, le=128)
    stop: list[Stop] = Field(default_factory=list, max_length=MOST_STOPS)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=128)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _streams(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given, but stream is not true")
        return self


Prompt = str | list[int]
MOST_PROMPTS = 2048


def _prompts(given: Any) -> list[Prompt]:
    """Converts a text, texts, token ids, or lists of token ids to a list of prompts."""
    if isinstance(given, str) or (isinstance(given, list) and given and all(_is_id(part) for part in given)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise ValueError("write a text, a list of texts, a list of token ids, or a list of such lists")
    if len(given) > MOST_PROMPTS:
        raise ValueError(f"{len(given):,} are more than {MOST_PROMPTS:,}")
    for part in given:
        if not isinstance(part, str) and not (isinstance(part, list) and all(_is_id(number) for number in part)):
            raise ValueError("write a text, a list of texts, a list of token ids, or a list of such lists")
    return given


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


Prompts = Annotated[list[Prompt], PlainValidator(_prompts)]


class CompletionBody(SamplingFields):
    """The body of ``/v1/completions``."""

    prompt: Prompts
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _possible(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of other than n is not there: ask for n answers and choose among them")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, so that nothing would be answered; with echo the prompt is")
        return self


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


class ToolCallTurn(Body):
    """A tool call in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Turn(Body):
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
    def text(self) -> str:
        """The content as one text."""
        return "".join(part.text or part.refusal for part in self.content)


class ToolFunction(Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(pattern=r"^[\w.:-]{1,128}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(Body):
    """The name of a function."""

    name: str


class ChosenTool(Body):
    """The one tool that the answer must call."""

    type: Literal["function"]
    function: ChosenFunction


class NamedSchema(Body):
    """A JSON schema for the answer."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with type json_schema, and only with it")
        return self


class ChatBody(SamplingFields):
    """The body of ``/v1/chat/completions``."""

    messages: list[Turn] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_ALTERNATIVES)
    tools: list[Tool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] = Field(default_factory=list)

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
        forced = self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool)
        if forced and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("response_format and a tool that has to be called exclude each other")
        return self


class ScoreBody(Body):
    """The body of ``/v1/score``: one conversation or several, each ending with the answer to score."""

    model: str
    messages: list[Turn] | list[list[Turn]] = Field(min_length=1, max_length=MOST_PROMPTS)

    @model_validator(mode="after")
    def _not_empty(self) -> ScoreBody:
        if not all(self.conversations):
            raise ValueError("a conversation has at least one message")
        return self

    @property
    def conversations(self) -> list[list[Turn]]:
        """The conversations as a list, also where a single one was given."""
        given: Any = self.messages
        return given if isinstance(given[0], list) else [given]


class EmbeddingBody(Body):
    """The body of ``/v1/embeddings``."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class LoadAdapterBody(Body):
    """The body of ``/v1/load_lora_adapter``."""

    lora_name: str = Field(pattern=r"^[\w.:/-]{1,200}$")
    lora_path: str = Field(min_length=1, max_length=4096)
    base_model_name: str | None = None


class UnloadAdapterBody(Body):
    """The body of ``/v1/unload_lora_adapter``."""

    lora_name: str


B = TypeVar("B", bound=Body)


def parse(kind: type[B], given: Any) -> tuple[B, list[str]]:
    """Parses a body; returns it with the names of ignored fields.

    Raises:
        ApiError: a field is unknown, missing or wrong; the message names it.
    """
    if not isinstance(given, dict):
        raise wrong("the body is not a JSON object")
    for name, advice in REFUSED.items():
        empty = given.get(name) in (None, "", [], {})
        if name in given and name not in kind.model_fields and not empty:
            raise wrong(f"`{name}` is not supported: {advice}", param=name)
    dropped = [name for name in given if name not in kind.model_fields and (name in IGNORED or name in REFUSED)]
    kept = {name: value for name, value in given.items() if name not in dropped}
    try:
        return kind.model_validate(kept), [name for name in dropped if given[name] is not None]
    except ValidationError as error:
        raise _of_pydantic(kind, error) from None


def _of_pydantic(kind: type[Body], error: ValidationError) -> Exception:
    """Converts the first validation error to one sentence."""
    found = error.errors(include_url=False, include_context=False)
    first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
    # Locations inside unions include the alternatives' names, which are no keys of the body.
    place = [part for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if first["type"] == "extra_forbidden":
        names = _names_beside(kind, place)
        near = get_close_matches(str(place[-1]), names, 1, 0.5)
        hint = f"; did you mean `{near[0]}`?" if near else f"; known are {', '.join(names)}" if names else ""
        return wrong(f"unknown field `{path}`{hint}", param=path, code="unknown_parameter")
    if first["type"] == "missing":
        return wrong(f"`{path}` is missing", param=path, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return wrong(f"`{path}`: {message}" if path else message, param=path or None, code="invalid_value")


def _names_beside(kind: type[Body], place: list[Any]) -> list[str]:
    """Returns the fields of the part of a body that contains a location."""
    if len(place) == 1:
        part: type[Body] | None = kind
    else:
        key, depth = str(place[0]), len([step for step in place if not isinstance(step, int)])
        part = PARTS.get(key) if depth == 2 else None
    return [] if part is None else [field.alias or name for name, field in part.model_fields.items()]


PARTS: dict[str, type[Body]] = {
    "messages": Turn,
    "tools": Tool,
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
}
