"""The engine's answers are those of forward passes over the whole text, whatever else is in the batch."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
import torch
from torch import Tensor

from families import SHAPES, VOCABULARY, tiny
from stoker.errors import UserError
from stoker.generate.decoder import decoder_of
from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.prefill import Prefill
from stoker.generate.request import BASE, Generation, Request, Sampling
from stoker.generate.request_queue import RequestQueue
from stoker.hardware.process_device import Device
from stoker.models.prepare_architecture import training_form

EXACT = Device("cpu", "fp64", "a test compares")
FAMILIES = sorted(set(SHAPES) - {"mamba"})
LENGTHS = (5, 17, 9, 30, 1)


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(seed)
    return [tuple(generator.integers(2, VOCABULARY, length).tolist()) for length in lengths]


def engine_of(family: str, **settings: int) -> GenerationEngine:
    model = tiny(family)
    training_form(model)
    return GenerationEngine(decoder_of(model, EXACT, context=64), **settings)


@torch.no_grad()
def log_probabilities(engine: GenerationEngine, ids: tuple[int, ...]) -> Tensor:
    """Log-probabilities of every next token, from one pass over the whole text without a cache, shape (T, V)."""
    model = engine.decoder.language.model
    with engine.decoder.at_work():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def assert_greedy(engine: GenerationEngine, generation: Generation) -> None:
    """Every token is the likeliest, and has the log-probability of a pass over the whole text."""
    start = len(generation.request.prompt) - 1
    expected = log_probabilities(engine, generation.so_far)[start:-1]
    assert generation.ids == expected.argmax(-1).tolist()
    given = [token.log_probability for token in generation.tokens]
    assert given == pytest.approx(expected.max(-1).values.tolist(), abs=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_in_a_batch_are_the_likeliest_of_whole_passes(family: str) -> None:
    engine = engine_of(family)
    for generation in engine.run([Request(prompt, 12 + 3 * number) for number, prompt in enumerate(prompts())]):
        assert len(generation.tokens) >= 12
        assert_greedy(engine, generation)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bloom"])
def test_sequences_that_join_and_leave_between_steps_do_not_change_each_other(family: str) -> None:
    engine = engine_of(family, rows=3)
    counts = (30, 4, 9, 20, 6, 3)
    waiting = [Request(p, count) for p, count in zip(prompts((3, 40, 8, 25, 2, 12)), counts, strict=True)]
    generations = []
    with engine.decoder.at_work():
        while waiting or engine.busy:
            if waiting:
                generations.append(engine.submit(waiting.pop(0)))
            engine.step()
            engine.step()
    assert [len(g.tokens) for g in generations] == list(counts)
    for generation in generations:
        assert_greedy(engine, generation)


def test_a_common_beginning_is_computed_once() -> None:
    engine = engine_of("llama")
    (common,) = prompts((40,))
    requests = [Request((*common, *end), 5) for end in prompts((3, 6, 1), seed=1)]
    computed = count_columns(engine)
    generations = engine.run(requests)
    assert sum(computed) == 40 + 2 * 6 + 1 + 3 * 4  # the beginning, two ends as long as the longer, one, the answers
    assert [g.shared for g in generations] == [40, 40, 40]
    for generation in generations:
        assert_greedy(engine, generation)


def count_columns(engine: GenerationEngine) -> list[int]:
    """Collects rows times columns of every pass from now on."""
    body, seen = engine.decoder.language.model.base_model, list[int]()
    body.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True)
    return seen


def test_equal_prompts_are_computed_once() -> None:
    engine = engine_of("llama")
    (prompt,) = prompts((20,))
    computed = count_columns(engine)
    drawn = [Request(prompt, 8, Sampling(temperature=1.0, seed=seed)) for seed in range(4)]
    answers = [generation.ids for generation in engine.run(drawn)]
    assert sum(computed) == 20 + 4 * 7
    assert len({tuple(answer) for answer in answers}) == 4


def test_a_later_request_goes_on_from_an_earlier_one() -> None:
    engine = engine_of("qwen3")
    (prompt,) = prompts((20,))
    first = engine.run([Request(prompt, 8, remember=True)])[0]
    second = engine.run([Request((*first.so_far, 7, 8), 8)])[0]
    assert second.shared == 27  # the last token of the answer never went through the model
    assert_greedy(engine, second)
    engine.forget()
    assert engine.run([Request((*first.so_far, 7, 8), 8)])[0].shared == 0


def test_long_prompts_go_through_in_pieces_beside_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.generate.generation_engine.PIECE", 8)
    engine = engine_of("mistral")
    short, long, longer = prompts((4, 30, 25))
    with engine.decoder.at_work():
        first = engine.submit(Request(short, 30))
        engine.step()
        others = [engine.submit(Request(prompt, 5)) for prompt in (long, longer)]
        engine.step()
        assert len(first.tokens) == 3 and not others[0].tokens  # it did not wait for all of the prompts
        while engine.busy:
            engine.step()
    for generation in (first, *others):
        assert_greedy(engine, generation)


def test_answers_wait_while_there_is_no_memory_for_them() -> None:
    token = 2 * 2 * 2 * 8 * 8  # layers, keys and values, heads, width, bytes
    engine = engine_of("llama", memory=60 * token)
    generations = engine.run([Request(prompt, 20) for prompt in prompts((10, 10, 10, 10))])
    for generation in generations:
        assert len(generation.tokens) == 20
        assert_greedy(engine, generation)


def test_requests_may_come_from_another_thread_at_any_time() -> None:
    engine = engine_of("llama")
    late: list[Generation] = []

    class Interrupted(Generation):
        """While the engine looks at it, another thread submits a request."""

        @property
        def cancelled(self) -> bool:
            if len(late) < 3:
                thread = Thread(target=lambda: late.append(engine.submit(Request(prompts()[0], 2))))
                thread.start()
                thread.join()
            return False

        @cancelled.setter
        def cancelled(self, _: bool) -> None: ...

    first = Interrupted(Request(prompts()[1], 2))
    engine._waiting.add(first)
    with engine.decoder.at_work():
        while engine.busy:
            engine.step()
    assert len(late) == 3
    for generation in (first, *late):
        assert_greedy(engine, generation)


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers() -> None:
    engine = engine_of("llama")
    with pytest.raises(UserError, match="the prompt is 64 tokens, and the model was built for 64 with the answer"):
        engine.submit(Request(tuple(range(64)), 1))
    assert len(engine.run([Request(tuple(range(60)), 100)])[0].tokens) == 4


@pytest.mark.parametrize("answer", [0, 1])
def test_scores_of_a_prompt_are_those_of_a_whole_pass(answer: int) -> None:
    engine = engine_of("gemma2")
    asked = prompts((30, 12))
    for generation in engine.run([Request(p, answer, score_prompt=True, alternatives=2) for p in asked]):
        assert (len(generation.tokens), generation.ended) == (answer, "length")
        prompt = generation.request.prompt
        expected = log_probabilities(engine, prompt)
        assert [token.id for token in generation.scored] == list(prompt[1:])
        for place, token in enumerate(generation.scored):
            assert token.log_probability == pytest.approx(float(expected[place, token.id]), abs=1e-10)
            best = expected[place].topk(2)
            assert [i for i, _ in token.alternatives] == best.indices.tolist()


def test_a_prompt_is_scored_without_a_step_up_to_the_context_and_one_token_more() -> None:
    engine = engine_of("llama")
    (long,) = prompts((65,))
    with engine.decoder.at_work():
        scored = engine.submit(Request(long, 0, score_prompt=True))
        alone = engine.submit(Request(long[:1], 0, score_prompt=True))
        while engine.busy:
            engine.step()
    assert scored.ended == alone.ended == "length" and not scored.tokens
    assert [token.id for token in scored.scored] == list(long[1:]) and not alone.scored
    expected = log_probabilities(engine, long[:64])
    got = [token.log_probability for token in scored.scored]
    assert got == pytest.approx([float(expected[place, token]) for place, token in enumerate(long[1:])], abs=1e-10)
    with pytest.raises(UserError, match="the prompt is 66 tokens"):
        engine.submit(Request((*long, 1), 0, score_prompt=True))


def test_what_comes_before_the_scored_tokens_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    (context, one, two) = prompts((45, 3, 5))
    computed: list[int] = []
    run = Prefill.run
    monkeypatch.setattr(Prefill, "run", lambda self, *given: computed.append(self.left) or run(self, *given))
    endings = (one, two, one[:1], two[:1])
    asked = [Request((*context, *after), 0, score_prompt=True, score_from=45) for after in endings]
    generations = engine.run(asked)
    assert sum(computed) < 45 + 4 * 6  # without sharing at least four times 45
    for generation, after in zip(generations, endings, strict=True):
        expected = log_probabilities(engine, (*context, *after))[44:]
        assert [token.id for token in generation.scored] == list(after)
        got = [token.log_probability for token in generation.scored]
        assert got == pytest.approx([float(expected[n, token]) for n, token in enumerate(after)], abs=1e-10)


def test_prompts_run_together_up_to_a_size_and_without_much_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.generate.request_queue.PASS", 64)
    together: list[int] = []
    run = Prefill.run
    monkeypatch.setattr(Prefill, "run", lambda self, *given: together.append(len(self.prompts)) or run(self, *given))
    engine = engine_of("llama")
    engine.run([Request(prompt, 1) for prompt in prompts((30, 32, 30, 4))])
    assert together == [2, 1, 1]  # 3 x 32 tokens are too many; of 2 x 30, 26 would be padding


@pytest.mark.parametrize("first", [1, 8])
def test_scored_tokens_are_computed_although_an_earlier_prompt_had_them(first: int) -> None:
    engine = engine_of("llama")
    (prompt,) = prompts((20,))
    engine.run([Request(prompt, 2, remember=True)])
    (generation,) = engine.run([Request(prompt, 0, score_prompt=True, score_from=first)])
    assert generation.shared == first - 1
    expected = log_probabilities(engine, prompt)
    assert [token.id for token in generation.scored] == list(prompt[first:])
    got = [token.log_probability for token in generation.scored]
    wanted = [float(expected[place - 1, prompt[place]]) for place in range(first, len(prompt))]
    assert got == pytest.approx(wanted, abs=1e-10)


def test_a_stop_token_ends_an_answer_and_no_other() -> None:
    engine = engine_of("llama")
    one, other = prompts((9, 14))
    free = engine.run([Request(one, 10), Request(other, 10)])
    stop = free[0].ids[4]
    first, second = engine.run([Request(one, 10, stop_ids=frozenset({stop})), Request(other, 10)])
    assert first.ended == "stop" and first.ids == free[0].ids[: free[0].ids.index(stop) + 1]
    assert second.ended == "length" and second.ids == free[1].ids


def test_a_cancelled_answer_leaves_the_others_alone() -> None:
    engine = engine_of("llama")
    one, other = prompts((9, 14))
    alone = engine.run([Request(other, 10)])[0]
    with engine.decoder.at_work():
        first, second = engine.submit(Request(one, 10)), engine.submit(Request(other, 10))
        engine.step()
        engine.step()
        first.cancel()
        while engine.busy:
            engine.step()
    assert first.ended == "cancelled" and len(first.tokens) == 3
    assert second.ids == alone.ids


def test_a_failure_ends_what_was_in_it_and_the_engine_goes_on() -> None:
    engine = engine_of("llama")
    one, other = prompts((9, 14))
    expected = engine.run([Request(other, 4)])[0].ids
    handle = engine.decoder.language.model.base_model.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        engine.run([Request(one, 4)])
    handle.remove()
    assert not engine.busy
    assert engine.run([Request(other, 4)])[0].ids == expected


def test_a_failing_pass_ends_only_what_is_in_it() -> None:
    engine = engine_of("llama")
    one, other, third = prompts((9, 14, 5))
    expected = engine.run([Request(one, 10)])[0].ids
    with engine.decoder.at_work():
        first = engine.submit(Request(one, 10))
        engine.step()
        second, waits = engine.submit(Request(other, 4)), engine.submit(Request(third, 4, adapter=BASE))
        handle = engine.decoder.language.model.base_model.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            engine.step()
        handle.remove()
        assert (second.ended, first.ended, waits.ended) == ("failed", None, None)
        assert isinstance(second.error, MemoryError)
        while engine.busy:
            engine.step()
    assert first.ids == expected and waits.ended == "length"


def fail(*_: object) -> None:
    raise MemoryError("no room")


def test_short_prompts_are_counted_as_the_memory_that_they_need() -> None:
    token = 2 * 2 * 2 * 8 * 8  # layers, keys and values, heads, width, bytes
    engine = engine_of("llama", memory=8 * 64 * token)
    generations = [engine.submit(Request(prompt, 5)) for prompt in prompts((4,) * 8)]
    with engine.decoder.at_work():
        engine.step()
        engine.step()
        assert engine.running == 8  # none of them waits for memory
        while engine.busy:
            engine.step()
    assert engine._token_bytes == token
    for generation in generations:
        assert_greedy(engine, generation)


def test_a_preempted_answer_goes_on_and_its_own_tokens_are_not_counted_as_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stoker.generate.generation_engine.AHEAD", 1)
    token = 2 * 2 * 2 * 8 * 8  # layers, keys and values, heads, width, bytes
    engine = engine_of("llama", memory=3 * 64 * token)
    preempted, add = [], RequestQueue.add

    def noted(queue: RequestQueue, generation: Generation, *, first: bool = False) -> None:
        preempted.extend([generation] if first else [])
        add(queue, generation, first=first)

    monkeypatch.setattr(RequestQueue, "add", noted)
    generations = engine.run([Request(prompt, 45, remember=True) for prompt in prompts((10,) * 4)])
    assert preempted and [generation.shared for generation in generations] == [0] * 4
    for generation in generations:
        assert len(generation.tokens) == 45
        assert_greedy(engine, generation)


def test_rows_of_few_tokens_are_counted_with_all_columns_that_they_take() -> None:
    token = 2 * 2 * 2 * 8 * 8  # layers, keys and values, heads, width, bytes
    engine = engine_of("llama", memory=4 * 64 * token)
    engine.run([Request(prompts((10,))[0], 1)])
    generations = [engine.submit(Request(prompt, 4)) for prompt in prompts((10,) * 8)]
    with engine.decoder.at_work():
        most = 0
        while engine.busy:
            engine.step()
            most = max(most, sum(batch.cache.nbytes for batch in engine._batches.values()))
    assert 0 < most <= 4 * 64 * token
    for generation in generations:
        assert_greedy(engine, generation)
