"""Text from a model: prompts rendered as in training, answers piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stoker.models.virtual_tokens import virtual_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def stream_answer(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    prompt_ids: Sequence[int],
    stop_ids: frozenset[int],
    *,
    new_tokens: int,
    temperature: float = 0.0,
    around: AbstractContextManager[None] | None = None,
) -> Iterator[str]:
    """The answer to a prompt, piece by piece as it is generated.

    Args:
        prompt_ids: the rendered prompt.
        stop_ids: tokens that end the answer; they are not part of the text.
        new_tokens: most tokens generated.
        temperature: 0 takes the most likely token each time.
        around: what encloses the generation, in the thread that it runs in.

    Raises:
        Exception: whatever generation raised, in the caller's thread.
    """
    from transformers import TextIteratorStreamer

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = torch.tensor([[*virtual_ids(model), *prompt_ids]], device=next(model.parameters()).device)
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    )
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with around or nullcontext():
                model.generate(  # type: ignore[operator]
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    streamer=streamer,
                    tokenizer=tokenizer,
                    num_beams=1,
                    max_new_tokens=new_tokens,
                    eos_token_id=sorted(stop_ids) or None,
                    pad_token_id=min(stop_ids, default=0),
                    **sampling,
                )
        except BaseException as error:
            failed.append(error)
            streamer.end()

    thread = Thread(target=work, daemon=True)
    thread.start()
    yield from streamer
    thread.join()
    if failed:
        raise failed[0]
