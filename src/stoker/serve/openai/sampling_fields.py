"""The fields of a request that say how to sample: OpenAI's, and those that vLLM and llama.cpp added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from stoker.serve.request_body import Body

MOST_ALTERNATIVES = 20
MOST_STOPS = 16
SHORTEST = 1e-4  # temperatures below this count as 0: the divided logits would overflow


class StreamOptions(Body):
    """Options of a stream; ``include_obfuscation`` has no effect."""

    include_usage: bool = False
    include_obfuscation: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=256)]


class SamplingFields(Body):
    """Fields that chat completions and completions share."""

    parts: ClassVar[Mapping[str, type[Body]]] = {"stream_options": StreamOptions}

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
        if given == "":
            raise ValueError("an empty text ends no answer")
        return [given] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _streams(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given, but stream is not true")
        return self
