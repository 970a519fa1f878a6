"""On a GPU: answers from pages, by the compiled kernel and by CUDA graphs, are those from rows."""

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


def test_steps_are_recorded_and_see_updates_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    model = long("llama", dtype=torch.float32, **HEADS_OF_16["llama"]).to("cuda").eval()
    decoder = decoder_of(model, Device("cuda", "fp32", "a test compares"), context=400)
    requests = [Request(prompt, 9 + 20 * number) for number, prompt in enumerate(prompts(LENGTHS))]
    engine = GenerationEngine(decoder, memory=2**28)
    answers = []
    for _ in range(2):
        answers.append([answer.ids for answer in engine.run(requests)])
        rows = GenerationEngine(decoder, memory=2**28, paged=False).run(requests)
        assert answers[-1] == [answer.ids for answer in rows]
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(-0.8)
    assert answers[0] != answers[1]
    assert len(engine._graphs._graphs) == 4  # of 8, 4, 2 and 1 rows
    assert not capsys.readouterr().err
