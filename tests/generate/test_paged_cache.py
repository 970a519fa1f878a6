"""Answers from keys and values in pages are those of transformers and of whole passes; pages follow the rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_adapters_by_request import lora
from test_engine import EXACT, FAMILIES, assert_greedy, prompts

from families import tiny
from stoker.generate import cache_choice
from stoker.generate.cache_choice import CacheChoice
from stoker.generate.decoder import Decoder, decoder_of
from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.page_pool import PagePool
from stoker.generate.paged_cache import PagedCache
from stoker.generate.request import BASE, Request
from stoker.generate.row_cache import Kept, RowCache
from stoker.hardware.process_device import Device
from stoker.models.attention.attention_scores import AttentionScores
from stoker.models.attention.paged_attention import _block_mask, _first_seen
from stoker.models.attention.paged_rows import PAGE, PagedRows
from stoker.models.families import family_of
from stoker.models.tuning.lora import fuse_lora

LENGTHS = (5, PAGE + 9, PAGE - 1, 2 * PAGE, 1)  # some end a page soon, one begins with a full one
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # their states are not in pages
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # and neither are the keys of their indexers
PACKED = sorted(set(FAMILIES) - {"falcon", *LINEAR, *INDEXED})


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.generate.page_pool.SMALLEST", 16)  # on a CPU attention reads the whole pool


def long(family: str, **changes: Any) -> Any:
    """A tiny model for long texts, whose attention goes through transformers' interface."""
    key = "n_positions" if family in ("gpt2", "gptj") else "max_position_embeddings"
    model = tiny(family, **{key: 512}, **changes)
    facts = family_of(model.config)
    if facts is not None and facts.attend is not None:
        facts.attend(model)
    return model


def engine_of(family: str, **settings: Any) -> GenerationEngine:
    return GenerationEngine(decoder_of(long(family), EXACT, context=400), paged=True, **settings)


def pool_of(engine: GenerationEngine) -> PagePool:
    """The pool of an engine that still uses pages."""
    cache = engine._caches.new()
    assert isinstance(cache, PagedCache)
    return cache.pool


@pytest.mark.parametrize("family", PACKED)
def test_answers_are_the_likeliest_of_whole_passes(family: str) -> None:
    engine = engine_of(family)
    for generation in engine.run([Request(prompt, 4 + 3 * n) for n, prompt in enumerate(prompts(LENGTHS))]):
        assert_greedy(engine, generation)
    assert pool_of(engine).used == 0


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gpt_neox", "bloom", "mistral", "gemma2", "gpt_oss", "llama4_text"]
)
def test_answers_are_those_of_transformers(family: str) -> None:
    engine = engine_of(family)
    answers = engine.run([Request(prompt, 9) for prompt in prompts(LENGTHS)])
    assert pool_of(engine).used == 0
    model = tiny(family, **{"n_positions" if family == "gpt2" else "max_position_embeddings": 512})
    for answer in answers:
        ids = torch.tensor([answer.request.prompt])
        alone: Any = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert answer.ids == alone[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", INDEXED)
def test_keys_of_indexers_are_kept_with_their_rows(family: str) -> None:
    engine = engine_of(family)
    assert isinstance(engine._caches.new(), RowCache)
    *some, common = prompts((3, 60, 20, 40))
    generations = engine.run([Request(prompt, 9, remember=True) for prompt in (*some, common)])
    generations += engine.run([Request((*common, *end), 5) for end in prompts((3, 6), seed=1)])
    assert [generation.shared for generation in generations[-2:]] == [40, 40]
    for generation in generations:
        assert_greedy(engine, generation)


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_rows_join_leave_and_are_preempted(family: str) -> None:
    engine = engine_of(family, rows=3, memory=5 * PAGE * token_bytes(family))
    waiting = [Request(p, count) for p, count in zip(prompts((PAGE - 5, 3, 200, 20)), (30, 140, 9, 20), strict=True)]
    generations, most = [], 0
    with engine.decoder.at_work():
        while waiting or engine.busy:
            if waiting:
                generations.append(engine.submit(waiting.pop(0)))
            engine.step()
            most = max(most, pool_of(engine).used)
    for generation in generations:
        assert_greedy(engine, generation)
    assert most <= 5 and pool_of(engine).used == 0


def token_bytes(family: str) -> int:
    heads = 4 if family == "bloom" else 2
    return 2 * 2 * heads * 8 * 8  # layers, keys and values, heads, width, bytes


def test_an_answer_without_room_for_its_next_page_is_preempted() -> None:
    engine = engine_of("llama", memory=3 * PAGE * token_bytes("llama"))
    one, other = prompts((PAGE - 20, PAGE - 40))
    with engine.decoder.at_work():
        generations = [engine.submit(Request(one, 9)), engine.submit(Request(other, 9))]
        engine.step()
        engine.step()
        for generation in generations:  # as if both had asked for more, which no reservation has seen
            object.__setattr__(generation.request, "max_tokens", 60)
        running = set()
        while engine.busy:
            engine.step()
            running.add((engine.running, pool_of(engine).used))
    assert max(used for _, used in running) == 3 and min(count for count, _ in running if count) == 1
    for generation in generations:
        assert len(generation.tokens) == 60
        assert_greedy(engine, generation)


def test_a_later_request_goes_on_from_an_earlier_one_and_a_beginning_is_computed_once() -> None:
    engine = engine_of("qwen3")
    (prompt,) = prompts((PAGE + 20,))
    first = engine.run([Request(prompt, 8, remember=True)])[0]
    later = engine.run([Request((*first.so_far, 7, n), 8) for n in (2, 3)])
    assert [generation.shared for generation in later] == [
        PAGE + 27
    ] * 2  # the last token of the answer never went through the model
    for generation in later:
        assert_greedy(engine, generation)
    assert pool_of(engine).used == 0


def test_adapters_share_the_pool() -> None:
    model = lora(long("llama"))
    fuse_lora(model)
    engine = GenerationEngine(decoder_of(model, EXACT, context=400), paged=True)
    requests = [Request(prompt, 12, adapter=name) for prompt in prompts(LENGTHS) for name in (None, BASE)]
    rows = GenerationEngine(engine.decoder, paged=False).run(requests)
    assert [g.ids for g in engine.run(requests)] == [g.ids for g in rows]
    assert pool_of(engine).used == 0


def test_a_failing_pass_frees_its_pages() -> None:
    engine = engine_of("llama")
    with engine.decoder.at_work():
        generation = engine.submit(Request(prompts((9,))[0], 4))
        engine.step()
        assert pool_of(engine).used == 1
        handle = engine.decoder.language.model.base_model.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            engine.step()
        handle.remove()
    assert generation.ended == "failed" and pool_of(engine).used == 0


def fail(*_: object) -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize("problem", ["fails", "differs"])
def test_attention_that_fails_or_differs_is_not_used(
    problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attention(_: object, q_BH1K: torch.Tensor, *__: object) -> torch.Tensor:
        if problem == "fails":
            raise RuntimeError("no compiler")
        return q_BH1K

    monkeypatch.setattr("stoker.models.attention.packed_attention.paged_attention", attention)
    engine = engine_of("llama")
    for generation in engine.run([Request(prompt, 9) for prompt in prompts(LENGTHS)]):
        assert_greedy(engine, generation)
    assert isinstance(engine._caches.new(), RowCache)
    reason = "RuntimeError: no compiler" if problem == "fails" else "other logits"
    assert capsys.readouterr().err == f"answers are generated without paged attention ({reason})\n"


@pytest.mark.parametrize(("factor", "kind"), [(1.4, PagedCache), (1.6, RowCache)])
def test_pages_are_used_unless_they_are_clearly_slower(
    factor: float, kind: type[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, run = [0.0], Decoder.run

    def timed(self: Decoder, ids_BT: torch.Tensor, cache: RowCache | PagedCache, read: Any) -> Any:
        clock[0] += factor if isinstance(cache, PagedCache) else 1.0
        return run(self, ids_BT, cache, read)

    monkeypatch.setattr(cache_choice, "reads_pages", lambda decoder: True)
    monkeypatch.setattr(cache_choice, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Decoder, "run", timed)
    decoder = decoder_of(long("llama"), EXACT, context=400)
    for number in range(2):  # as rounds of a policy's answers, of which the first is measured
        engine = GenerationEngine(decoder)
        if number:
            monkeypatch.setattr(CacheChoice, "_accepts", None)
        for generation in engine.run([Request(prompt, 9) for prompt in prompts(LENGTHS)]):
            assert_greedy(engine, generation)
        assert type(engine._caches.new()) is kind
    slow = "a step takes 1.6 times as long as with rows"
    said = f"answers are generated without paged attention ({slow})\n" if kind is RowCache else ""
    assert capsys.readouterr().err == said


def test_pages_are_for_packed_attention_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(GenerationEngine(decoder_of(long("llama"), EXACT))._caches.new(), RowCache)
    monkeypatch.setattr(cache_choice, "find_spec", lambda name: name)
    gpu = Device("cuda", "fp64", "a test")
    assert cache_choice.reads_pages(replace(decoder_of(long("gpt_oss"), EXACT), device=gpu))
    assert not cache_choice.reads_pages(replace(decoder_of(long("falcon"), EXACT), device=gpu))


def test_memory_follows_the_length_of_each_row() -> None:
    lengths = [10, 1000]
    assert PagedCache.tokens_for(lengths) == 9 * PAGE < RowCache.tokens_for(lengths)
    cache = PagedCache(1, PagePool(2**20))
    for length in lengths:
        cache.add(random_states(length))
    assert cache.pool.used == 9
    cache.drop(1)
    assert cache.pool.used == 1


def test_a_pool_grows_and_keeps_its_content() -> None:
    cache = PagedCache(2, PagePool(2**30))
    rows = [random_states(length, layers=2) for length in (1, 40 * PAGE, 70 * PAGE, 5)]
    for row in rows:
        cache.add(row)
    cache.drop(0)
    for number, expected in enumerate((rows[3], rows[1], rows[2])):
        for given, pair in zip(cache.kept(number), expected, strict=True):
            torch.testing.assert_close(given, pair, rtol=0, atol=0)


def random_states(length: int, layers: int = 1) -> Kept:
    return tuple((torch.randn(2, length, 4), torch.randn(2, length, 6)) for _ in range(layers))


@pytest.mark.parametrize(
    ("sizes", "read"),
    [
        ({}, [[3, 1, 4], [2], []]),
        ({"window": 3 * PAGE}, [[3, 1, 4], [2], []]),
        ({"window": 100}, [[1, 4], [2], []]),
        ({"window": 44}, [[4], [2], []]),  # exactly the last page's tokens
        ({"window": 45}, [[1, 4], [2], []]),
        ({"chunk": 3 * PAGE}, [[3, 1, 4], [2], []]),
        ({"chunk": PAGE}, [[4], [2], []]),
        ({"chunk": 150}, [[1, 4], [2], []]),
    ],
)
def test_a_gpus_kernel_is_given_the_pages_that_a_row_sees(sizes: dict[str, int], read: list[list[int]]) -> None:
    table_BL = torch.tensor([[3, 1, 4], [2, 0, 0], [0, 0, 0]])
    rows = PagedRows(table_BL, torch.tensor([2 * PAGE + 44, 5, 0]), 6)
    blocks = _block_mask(rows, _first_seen(rows, AttentionScores(**sizes)))
    counts, pages = blocks.kv_num_blocks.flatten().tolist(), blocks.kv_indices[:, 0, 0].tolist()
    assert [own[:count] for own, count in zip(pages, counts, strict=True)] == read


def test_page_nought_belongs_to_no_row() -> None:
    """It fills the table behind the pages of shorter rows."""
    rows = PagedRows(torch.tensor([[3, 1], [2, 0]]), torch.tensor([2 * PAGE, 5]), 5)
    owner_N, first_N = rows.owners
    assert owner_N.tolist() == [-1, 0, 1, 0, -1]
    assert first_N[1:4].tolist() == [PAGE, 0, 0]
