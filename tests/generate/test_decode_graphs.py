"""Recorded decoding steps give the answers of whole passes; a stand-in for CUDA graphs runs the recorded work again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from test_adapters_by_request import lora
from test_engine import EXACT, assert_greedy, fail, prompts
from test_paged_cache import LENGTHS, PAGE, long, pool_of
from torch import Tensor

from stoker.generate import decode_graphs, generation_engine
from stoker.generate.decoder import cast_weights, decoder_of
from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.request import BASE, Request
from stoker.hardware.process_device import Device
from stoker.models.tuning.lora import fuse_lora


@dataclass
class Recorder:
    """Records work as a graph does: on the tensors that it got, into the tensor that it returned."""

    replays: int = 0
    error: float = 0.0
    recorded: list[int] = field(default_factory=list)  # rows of each

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        logits_BV = torch.zeros_like(work())
        self.recorded.append(len(logits_BV))

        def replay() -> None:
            self.replays += 1
            logits_BV.copy_(work() + self.error * torch.randn_like(logits_BV))

        return replay, logits_BV


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr("stoker.generate.page_pool.SMALLEST", 16)
    recorder = Recorder()
    monkeypatch.setattr(generation_engine, "recorder_of", lambda decoder: recorder)
    return recorder


def engine_of(family: str = "llama", **settings: Any) -> GenerationEngine:
    return GenerationEngine(decoder_of(long(family), EXACT, context=400), paged=True, **settings)


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma2", "gpt_oss"])
def test_rows_that_join_and_leave_change_the_graph(family: str, recorder: Recorder) -> None:
    engine = engine_of(family)
    counts, generations = (40, 6, 12, 20, 3, 9), []
    waiting = [Request(p, n) for p, n in zip(prompts((PAGE - 9, 3, 200, 20, 7, 1)), counts, strict=True)]
    with engine.decoder.at_work():
        while waiting or engine.busy:
            if waiting:
                generations.append(engine.submit(waiting.pop(0)))
            engine.step()
    for generation in generations:
        assert_greedy(engine, generation)
    assert recorder.recorded == [1, 2, 4, 8]
    assert recorder.replays == 4 + 39  # one to compare each, and one for each step of the longest answer
    assert pool_of(engine).used == 0


def test_rows_that_fill_the_batch_change_nothing(recorder: Recorder) -> None:
    engine = engine_of()
    alone = [engine.run([Request(prompt, 12)])[0].tokens for prompt in prompts(LENGTHS)]
    together = engine.run([Request(prompt, 12) for prompt in prompts(LENGTHS)])
    for one, generation in zip(alone, together, strict=True):
        assert [token.id for token in one] == generation.ids
        expected = pytest.approx([token.log_probability for token in one], abs=1e-10)
        assert [token.log_probability for token in generation.tokens] == expected


def test_each_adapter_has_its_graph_and_updates_in_place_are_seen(recorder: Recorder) -> None:
    model = lora(long("llama"))
    fuse_lora(model)
    engine = GenerationEngine(decoder_of(model, EXACT, context=400), paged=True)
    requests = [Request(prompt, 9, adapter=name) for name in (None, BASE) for prompt in prompts((5, 6))]
    before = [g.ids for g in engine.run(requests)]
    assert recorder.recorded == [2, 2]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.mul_(-3.0)
    after = [g.ids for g in engine.run(requests)]
    assert recorder.recorded == [2, 2]
    rows = GenerationEngine(engine.decoder, paged=False).run(requests)
    assert after == [g.ids for g in rows] != before
    engine.forget()
    engine.run(requests)
    assert recorder.recorded == [2] * 4


def test_a_larger_pool_or_table_is_recorded_again(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.generate.page_pool.SMALLEST", 2)
    monkeypatch.setattr("stoker.generate.paged_cache.COLUMNS", 1)
    engine = engine_of()
    generation = engine.run([Request(prompts((PAGE - 3,))[0], 9)])[0]
    assert_greedy(engine, generation)
    assert recorder.recorded == [1, 1] and pool_of(engine).pages == 8


@pytest.mark.parametrize("problem", ["other logits", "capture failed"])
def test_steps_that_fail_or_differ_are_not_recorded(
    problem: str, recorder: Recorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> Any:
        raise RuntimeError("capture failed")

    recorder.error = 1.0
    if problem == "capture failed":
        monkeypatch.setattr(generation_engine, "recorder_of", lambda decoder: fails)
    engine = engine_of()
    for generation in engine.run([Request(prompt, 9) for prompt in prompts(LENGTHS)]):
        assert_greedy(engine, generation)
    assert capsys.readouterr().err == f"answers are generated without CUDA graphs ({problem})\n"
    assert len(recorder.recorded) == (problem == "other logits")


def test_an_error_of_the_model_is_its_own(recorder: Recorder) -> None:
    engine = engine_of()
    with engine.decoder.at_work():
        generation = engine.submit(Request(prompts((9,))[0], 4))
        engine.step()
        handle = engine.decoder.language.model.base_model.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            engine.step()
        handle.remove()
    assert generation.ended == "failed" and pool_of(engine).used == 0


def test_which_models_are_recorded() -> None:
    decoder = decoder_of(long("llama", dtype=torch.float32), Device("cpu", "fp32", ""), context=400)
    recorder_of = decode_graphs.recorder_of
    assert recorder_of(decoder) is None
    gpu = replace(decoder, device=Device("cuda", "fp32", ""))
    assert recorder_of(gpu) is not None
    assert recorder_of(replace(gpu, others=lambda mine: mine)) is None
    assert recorder_of(replace(gpu, within=lambda work: work())) is None
    half = replace(gpu, device=Device("cuda", "bf16", ""))
    assert recorder_of(half) is None  # autocast would cast its weights in each replay
    copies = cast_weights(half, 1 << 30)
    assert copies is not None and cast_weights(half, copies.nbytes) is None
    assert recorder_of(replace(half, cast=copies)) is not None
    assert cast_weights(gpu, 1 << 30) is None and cast_weights(replace(half, others=lambda mine: mine), 1 << 30) is None
    decoder.model.to(torch.bfloat16)
    assert recorder_of(half) is not None
