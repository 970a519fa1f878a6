"""``/v1/score``: scores of answers by a reward model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from stoker.data.files.rows import Raw
from stoker.data.templates.chat_template import as_template_message
from stoker.data.tokenise import RowSettings, tokenise
from stoker.models.attention.collate import cut_after_last_target
from stoker.serve.api_error import bad_request
from stoker.serve.endpoint_state import Service, Usage
from stoker.serve.openai.bodies import ScoreBody
from stoker.serve.served_models.served import Served


async def answer_scores(service: Service, served: Served, body: ScoreBody) -> dict[str, Any]:
    """Answers one request."""
    scores = served.scores
    if scores is None:
        raise bad_request(f"{served.name} writes answers and does not score them", param="model")
    conversations = [[as_template_message(turn.message) for turn in turns] for turns in body.conversations]
    rows = await service.in_texts_thread(lambda: _rows(served, conversations))
    usage = Usage(service, served)
    for row in rows:
        usage.prompt_of(len(row))
    found = await asyncio.wrap_future(service.worker.call(lambda: scores(rows), between=True))
    data = [{"object": "score", "index": number, "score": score} for number, score in enumerate(found)]
    counts = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
    return {"object": "list", "data": data, "model": served.name, "usage": counts}


def _rows(served: Served, conversations: Sequence[Sequence[dict[str, Any]]]) -> list[list[int]]:
    """Tokenises conversations with their last answers, as the reward model reads them.

    Raises:
        ApiError: one does not end with an answer, or is too long.
        ApiError, UserError: one is rejected by the chat template.
    """
    for number, turns in enumerate(conversations):
        if turns[-1]["role"] != "assistant":
            raise bad_request(
                "a conversation to be scored ends with the assistant's answer", param=f"messages[{number}]"
            )
    if not served.scores_whole_text:
        return _as_in_training(served, conversations)
    rows = [served.opened.prompt_ids(turns, answered=True) for turns in conversations]
    for number, row in enumerate(rows):
        served.check_length(len(row) + 1, param=f"messages[{number}]")
    return rows


def _as_in_training(served: Served, conversations: Sequence[Sequence[dict[str, Any]]]) -> list[list[int]]:
    """Tokenises conversations up to the stop token of their last answers, as in the training of a reward run."""
    opened = served.opened
    limit = served.host.engine.context or 1 << 30
    settings = RowSettings("messages", (), "last", "drop", limit, opened.special_tokens)
    raws = [Raw("messages", number, {"messages": list(turns)}) for number, turns in enumerate(conversations)]
    found = tokenise(raws, opened.codec, settings)
    if found.dropped:
        first = found.dropped[0]
        raise bad_request(f"this conversation cannot be scored: {first.reason}", param=f"messages[{first.row}]")
    spans = [slice(entry["start"], entry["start"] + entry["length"]) for entry in found.index]
    return [cut_after_last_target((found.ids[span], found.trained[span]))[0].tolist() for span in spans]
