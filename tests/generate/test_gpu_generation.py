"""On a GPU: answers from pages are those from rows, by the compiled kernel."""

from __future__ import annotations

import pytest
import torch
from test_engine import prompts
from test_paged_cache import LENGTHS, long

from stoker.generate.decoder import decoder_of
from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.paged_cache import PagedCache
from stoker.generate.request import Request
from stoker.hardware.process_device import Device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


HEADS_OF_16 = {  # the smallest of the compiled kernel
    "llama": {"hidden_size": 64},
    "gpt2": {"n_embd": 64},
    "bloom": {"hidden_size": 64},
    "mistral": {"hidden_size": 64},
    "gemma2": {"head_dim": 16},
    "gpt_oss": {"head_dim": 16},
}


@pytest.mark.parametrize("family", HEADS_OF_16)
def test_answers_from_pages_are_those_from_rows(family: str) -> None:
    model = long(family, dtype=torch.float32, **HEADS_OF_16[family]).to("cuda").eval()
    decoder = decoder_of(model, Device("cuda", "fp32", "a test compares"), context=400)
    requests = [Request(prompt, 9) for prompt in prompts(LENGTHS)]
    engine = GenerationEngine(decoder, memory=2**28)
    pages = engine.run(requests)
    assert isinstance(engine._caches.new(), PagedCache)  # the first step agreed with rows
    rows = GenerationEngine(decoder, memory=2**28, paged=False).run(requests)
    assert [answer.ids for answer in pages] == [answer.ids for answer in rows]
