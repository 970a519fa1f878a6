"""Answers of llama.cpp's server in the form of OpenAI's API: without fields of its own, and with the alternatives that
were requested.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from stoker.serve.openai.sse import event

END = b"\n\n"  # of an event
DATA = b"data: {"


def requested_alternatives(alternatives: int) -> int:
    """Returns the number to request from llama.cpp, which returns no log-probabilities at all for 0."""
    return max(1, alternatives)


def as_openai(answer: Any, alternatives: int) -> Any:
    """Returns an answer, or a chunk of one.

    Args:
        alternatives: most alternatives of a token.
    """
    if not isinstance(answer, dict):
        return answer
    answer.pop("timings", None)
    for choice in answer.get("choices") or ():
        for token in (choice.get("logprobs") or {}).get("content") or ():
            token["top_logprobs"] = token.get("top_logprobs", [])[:alternatives]
            for each in (token, *token["top_logprobs"]):
                each.pop("id", None)
    return answer


async def events_as_openai(parts: AsyncIterator[bytes], alternatives: int) -> AsyncIterator[bytes]:
    """Yields the events of a stream; see `as_openai`."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(END)
        for found in whole:
            is_chunk = found.startswith(DATA)
            yield event(as_openai(json.loads(found[len(DATA) - 1 :]), alternatives)) if is_chunk else found + END
    if rest:
        yield rest
