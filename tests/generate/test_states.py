"""Answers of models with linear attention: its states follow the rows, and are never cut at a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engine import EXACT, assert_greedy, count_columns, engine_of, prompts
from test_paged_cache import LINEAR, long

from families import tiny
from stoker.errors import UserError
from stoker.generate.decoder import decoder_of
from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.request import Request, Sampling


@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.often("qwen3_next")
def test_answers_are_those_of_transformers(family: str) -> None:
    engine = GenerationEngine(decoder_of(long(family), EXACT, context=400), paged=True)  # states are not in pages
    answers = engine.run([Request(prompt, 9) for prompt in prompts()])
    model: Any = tiny(family, max_position_embeddings=512)
    for answer in answers:
        ids = torch.tensor([answer.request.prompt])
        alone = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert answer.ids == alone[0, ids.shape[1] :].tolist()


def test_prompts_in_pieces_join_and_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.generate.generation_engine.PIECE", 16)
    engine = engine_of("qwen3_next", rows=3)
    counts = (30, 4, 9, 20, 6, 3)
    waiting = [Request(p, count) for p, count in zip(prompts((3, 40, 8, 25, 2, 12)), counts, strict=True)]
    generations = []
    with engine.decoder.at_work():
        while waiting or engine.busy:
            for _ in range(2):
                if waiting:
                    generations.append(engine.submit(waiting.pop(0)))
            engine.step()
    assert [len(g.tokens) for g in generations] == list(counts)
    for generation in generations:
        assert_greedy(engine, generation)


def test_common_beginnings_and_turns_of_a_conversation_start_at_their_states() -> None:
    engine = engine_of("qwen3_next")
    (common,) = prompts((40,))
    generations = engine.run([Request((*common, *end), 5, remember=True) for end in prompts((3, 6, 1), seed=1)])
    assert [generation.shared for generation in generations] == [40, 40, 40]
    computed = count_columns(engine)
    turns = [Request((*generations[i].so_far, *end), 5, remember=True) for i, end in enumerate(prompts((1, 3), seed=2))]
    generations += engine.run(turns)  # the last token of an answer was not passed
    assert [generation.shared for generation in generations[3:]] == [40 + 3 + 4, 40 + 6 + 4]
    assert sum(computed) == 2 + 4 + 2 * 4
    for generation in generations:
        assert_greedy(engine, generation)


def test_a_state_is_reused_after_the_last_of_its_tokens_only() -> None:
    engine = engine_of("qwen3_next")
    (prompt,) = prompts((20,))
    (first,) = engine.run([Request(prompt, 5, remember=True)])
    shorter, other = engine.run([Request(first.so_far[:22], 5), Request((*prompt, 9), 5)])
    again, fresh = engine.run([Request((*first.so_far, 3, 4), 5), Request(tuple(prompts((18,), seed=3)[0]), 5)])
    assert [g.shared for g in (shorter, other, again, fresh)] == [0, 0, 24, 0]
    for generation in (shorter, other, again, fresh):
        assert_greedy(engine, generation)


def test_equal_prompts_are_computed_once() -> None:
    engine = engine_of("qwen3_next")
    (prompt,) = prompts((20,))
    computed = count_columns(engine)
    answers = engine.run([Request(prompt, 8, Sampling(temperature=1.0, seed=seed)) for seed in range(4)])
    assert sum(computed) == 20 + 4 * 7
    assert len({tuple(answer.ids) for answer in answers}) == 4
    for answer in answers:
        assert answer.ids == engine_of("qwen3_next").run([answer.request])[0].ids


def test_states_count_as_memory_of_each_row() -> None:
    decoder = engine_of("qwen3_next").decoder
    cache = decoder.new_rows()
    cache.open([5, 5], [None, None])
    with decoder.at_work():
        decoder.preview(torch.tensor(prompts((5, 5))), cache)
    # 2 · 16 keys and queries and 48 values of the last 4 tokens; 8 heads of 4 · 6; float64
    assert cache.state_bytes == 8 * ((2 * 16 + 48) * 4 + 8 * 4 * 6)
    assert cache.token_bytes == 8 * 2 * 2 * 8  # keys and values of two heads of one layer
    few = GenerationEngine(decoder, memory=4 * 64 * cache.token_bytes)  # 64 columns of four rows without states
    few.run([Request(prompts((5,))[0], 2)])  # sizes are known from the first prompt on
    with decoder.at_work():
        generations = [few.submit(Request(prompt, 9)) for prompt in prompts((5, 9, 5, 9))]
        most = 0
        while few.busy:
            few.step()
            most = max(most, few.running)
    assert most == 3
    for generation in generations:
        assert_greedy(few, generation)


def test_states_of_other_families_are_refused() -> None:
    with pytest.raises(UserError, match="generates no answers with models of family mamba"):
        GenerationEngine(decoder_of(tiny("mamba"), EXACT, context=64))
