"""``/v1/embeddings``: the mean of the last hidden states over a text's tokens, normalised to length 1.

Shapes: B rows, T columns of a pass, D width.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.errors import UserError
from stoker.generate.generation_engine import prompt_too_long
from stoker.serve.api_error import bad_request, of_user_error
from stoker.serve.endpoint_state import Service, Usage
from stoker.serve.openai.bodies import EmbeddingBody
from stoker.serve.served_models.served import Served

COLUMNS = 512  # columns per pass
POSITIONS = 2048  # positions of rows computed together, including padding


async def embeddings(service: Service, served: Served, body: EmbeddingBody) -> dict[str, Any]:
    """Answers one request."""
    decoder = served.host.engine.decoder
    if decoder.language.head is None:
        raise bad_request("this model gives no hidden states, only logits", param="model")
    model: Any = decoder.language.model
    width = int(model.get_input_embeddings().weight.shape[1])
    if body.dimensions not in (None, width):
        raise bad_request(f"this model's embeddings have {width:,} dimensions, no other number", param="dimensions")

    def encoded() -> list[list[int]]:
        return [served.opened.text_ids(text) if isinstance(text, str) else text for text in body.input]

    rows = await service.in_texts_thread(encoded)
    for number, row in enumerate(rows):
        served.check_ids(row, param=f"input[{number}]")
        if not row:
            raise bad_request(f"input[{number}] is empty", param=f"input[{number}]")
        if decoder.context is not None and len(row) > decoder.context:
            raise of_user_error(UserError(prompt_too_long(len(row), decoder.context)), param=f"input[{number}]")
    usage = Usage(service, served)
    found: dict[int, list[float]] = {}
    for group in _groups(rows):
        chosen = [rows[number] for number in group]
        future = service.worker.call(lambda chosen=chosen: mean_states(served, chosen), between=True)  # type: ignore[misc]
        for number, vector in zip(group, (await asyncio.wrap_future(future)).tolist(), strict=True):
            found[number] = vector
            usage.prompt_of(len(rows[number]))
    data = [
        {"object": "embedding", "index": number, "embedding": _written(found[number], body)}
        for number in range(len(rows))
    ]
    counts = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
    return {"object": "list", "data": data, "model": served.name, "usage": counts}


def _groups(rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Groups the rows by length, up to `POSITIONS` together."""
    group: list[int] = []
    for number in sorted(range(len(rows)), key=lambda n: len(rows[n])):
        if group and (len(group) + 1) * len(rows[number]) > POSITIONS:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _written(vector: list[float], body: EmbeddingBody) -> list[float] | str:
    if body.encoding_format == "float":
        return vector
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()


def mean_states(served: Served, rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns the embedding of each row, shape (B, D), in float32. Must be called in the engine's thread."""
    decoder, adapter = served.host.engine.decoder, served.adapter
    with decoder.at_work(), decoder.using(adapter):
        known = decoder.virtual_keys_values(adapter)
        before = [max(number, 0) for number in decoder.virtual_ids(adapter)]
        ids = [np.asarray([*before, *row], dtype=np.int64) for row in rows]
        cache = decoder.new_rows()
        cache.open([len(row) for row in ids], [known] * len(ids))
        width = max(len(row) for row in ids)
        ids_BC = np.zeros((len(ids), width), dtype=np.int64)
        for number, row in enumerate(ids):
            ids_BC[number, width - len(row) :] = row
        starts_B1 = torch.tensor([start + len(before) for start in cache.starts])[:, None]
        sums_BD: Tensor | None = None
        while cache.end < width:
            first = cache.end
            part = torch.from_numpy(ids_BC[:, first : first + COLUMNS]).to(decoder.device.torch)
            used_BT1 = (torch.arange(first, first + part.shape[1]) >= starts_B1).to(part.device)[:, :, None]
            pooled_BD = decoder.run(part, cache, partial(_sum, used_BT1))
            sums_BD = pooled_BD if sums_BD is None else sums_BD + pooled_BD
        assert sums_BD is not None
        return torch.nn.functional.normalize(sums_BD, dim=-1).cpu()


def _sum(used_BT1: Tensor, hidden_BTD: Tensor) -> Tensor:
    """Sums the states of the used columns."""
    return torch.where(used_BT1, hidden_BTD.float(), 0.0).sum(1)
