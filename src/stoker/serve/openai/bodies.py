"""The bodies of requests other than chat: completions, scores, embeddings, adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from stoker.serve.openai.chat_body import Turn
from stoker.serve.openai.sampling_fields import MOST_ALTERNATIVES, SamplingFields
from stoker.serve.request_body import Body

MOST_PROMPTS = 2048
Prompt = str | list[int]


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
            raise ValueError("best_of other than n is not supported: request n answers and choose among them")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, so that nothing would be answered; with echo the prompt is")
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
