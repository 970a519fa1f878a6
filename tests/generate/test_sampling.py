"""Truncation and penalties against transformers' own; draws against their distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stoker.errors import UserError
from stoker.generate.request import Generation, Request, Sampling, Token
from stoker.generate.sampling import least_logits, next_tokens, uniform

VOCABULARY = 3000
CHI_SQUARE = {2: 13.82, 4: 18.47, 19: 43.82}  # the 99.9 % quantile, by degrees of freedom


def chi_square(counts: Sequence[float], expected: Tensor) -> float:
    return float(((torch.tensor(counts) - expected) ** 2 / expected).sum())


def logits(seed: int, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def generation(
    sampling: Sampling, prompt: tuple[int, ...] = (1,), answer: tuple[int, ...] = (), **more: int
) -> Generation:
    return Generation(Request(prompt, 10, sampling, **more), tokens=[Token(i, 0.0) for i in answer])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, top_k=40),
        Sampling(temperature=1.3, top_p=0.9),
        Sampling(temperature=1.0, top_p=0.3),
        Sampling(temperature=1.0, top_p=0.0),
        Sampling(temperature=0.8, min_p=0.05),
        Sampling(temperature=1.5, top_k=100, top_p=0.8, min_p=0.01),
        Sampling(temperature=3.0, top_p=0.999),  # nearly all tokens: more than are sorted first
        Sampling(temperature=1.0, top_k=VOCABULARY + 5, top_p=0.5),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_that_may_be_drawn_are_those_of_transformers(sampling: Sampling, seed: int) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    expected = warpers(torch.tensor([[1]]), logits(seed)[None].clone())[0].softmax(-1)
    scaled = logits(seed) / sampling.temperature
    beside = Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=3)
    rows_BV = scaled.expand(3, -1)
    least_B1 = least_logits(rows_BV, rows_BV.logsumexp(-1, keepdim=True), [sampling, *beside])
    assert torch.equal(scaled >= least_B1[0], expected > 0)
    assert (rows_BV >= least_B1).sum(1).tolist()[1:] == [VOCABULARY, 3]


class Reads(TorchDispatchMode):
    """Counts the operators for which the host waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


def test_truncation_reads_from_the_device_once_for_all_rows() -> None:
    samplings = [Sampling(temperature=1.0, top_p=0.5, seed=1), Sampling(temperature=0.7, top_k=20, min_p=0.01)] * 8
    rows_BV = torch.stack([logits(seed) for seed in range(len(samplings))])
    with Reads() as reads:
        together = next_tokens(rows_BV, [generation(sampling) for sampling in samplings])
    assert reads.count == 1
    alone = [next_tokens(rows_BV[i : i + 1], [generation(s)])[0].id for i, s in enumerate(samplings)]
    assert [token.id for token in together] == alone


def test_equal_logits_are_sampled_or_not_together() -> None:
    tied = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    rows = [generation(Sampling(temperature=1.0, top_k=2, seed=seed)) for seed in range(200)]
    assert {token.id for token in next_tokens(tied.expand(len(rows), -1), rows)} == {1, 2, 3, 4}


def test_penalties_are_those_of_transformers_and_of_openai() -> None:
    prompt, answer = (5, 9, 9, 200), (7, 7, 7, 12)
    sampling = Sampling(
        repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3, bias=((33, 25.0), (5, -9.0))
    )
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *answer]]), logits(0)[None].clone())[0]
    for token, count in Counter(answer).items():
        expected[token] -= 0.4 + 0.3 * count
    expected[33] += 25.0
    expected[5] -= 9.0
    found = next_tokens(logits(0)[None], [generation(sampling, prompt, answer, alternatives=VOCABULARY)])[0]
    order = expected.log_softmax(-1).sort(descending=True, stable=True)
    assert found.id == int(order.indices[0])
    given = dict(found.alternatives)
    assert torch.allclose(
        torch.tensor([given[i] for i in range(VOCABULARY)]).double(), expected.log_softmax(-1), atol=1e-9
    )


def test_a_step_penalises_the_token_before_it_and_reads_the_prompt_no_more() -> None:
    reads = 0

    class Prompt(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            nonlocal reads
            reads += 1
            return super().__iter__()

    sampling, prompt = Sampling(repetition_penalty=1.7), (5, 9, 9, 200)
    one = generation(sampling, Prompt(prompt))
    for step in range(6):
        found = next_tokens(logits(step)[None], [one])[0]
        again = next_tokens(logits(step)[None], [generation(sampling, prompt, tuple(one.ids))])[0]
        assert found == again
        one.tokens.append(found)
    assert reads == 1


def test_draws_follow_the_distribution_and_only_the_seed_and_the_number_matter() -> None:
    few = torch.tensor([2.0, 0.5, 1.0, -1.0, 1.5], dtype=torch.float64)
    expected = (few / 0.8).softmax(-1)
    rows = [generation(Sampling(temperature=0.8, seed=seed)) for seed in range(4000)]
    drawn = next_tokens(few.expand(len(rows), -1), rows)
    counts = Counter(token.id for token in drawn)
    assert chi_square([counts[i] for i in range(5)], expected * len(rows)) < CHI_SQUARE[4]
    assert drawn[0].log_probability == pytest.approx(float(expected[drawn[0].id].log()), abs=1e-12)
    alone = [next_tokens(few[None], [row])[0].id for row in rows[:50]]
    assert alone == [token.id for token in drawn[:50]]


def test_truncated_draws_follow_the_distribution_too() -> None:
    few = torch.tensor([2.0, 0.5, 1.0, -1.0, 1.5], dtype=torch.float64)
    expected = few.softmax(-1)[[0, 2, 4]]
    rows = [generation(Sampling(temperature=1.0, top_k=3, seed=seed)) for seed in range(4000)]
    counts = Counter(token.id for token in next_tokens(few.expand(len(rows), -1), rows))
    assert set(counts) == {0, 2, 4}
    assert chi_square([counts[i] for i in (0, 2, 4)], expected / expected.sum() * len(rows)) < CHI_SQUARE[2]


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_number() -> None:
    by_seed = torch.tensor([uniform(seed, 3) for seed in range(2000)])
    by_number = torch.tensor([uniform(3, number) for number in range(2000)])
    for numbers in (by_seed, by_number):
        assert numbers.min() >= 0 and numbers.max() < 1
        assert chi_square(torch.histc(numbers, 20, 0, 1).tolist(), torch.full((20,), 100.0)) < CHI_SQUARE[19]
    assert uniform(-1, 0) == uniform(2**64 - 1, 0) and uniform(0, 1) != uniform(1, 0)


def test_temperature_nought_takes_the_likeliest_and_states_its_own_probability() -> None:
    (token,) = next_tokens(logits(1)[None], [generation(Sampling())])
    assert token.id == int(logits(1).argmax())
    assert token.log_probability == pytest.approx(float(logits(1).log_softmax(-1).max()), abs=1e-12)


def test_stop_tokens_wait_for_the_least_number_of_tokens() -> None:
    best = int(logits(2).argmax())
    early = Generation(Request((1,), 10, stop_ids=frozenset({best}), min_tokens=1))
    (token,) = next_tokens(logits(2)[None], [early])
    assert token.id != best
    early.tokens.append(token)
    assert next_tokens(logits(2)[None], [early])[0].id == best


def test_a_row_does_not_change_its_neighbours() -> None:
    rows = torch.stack([logits(0), logits(1), logits(2)])
    before = rows.clone()
    wild = Sampling(temperature=0.5, top_p=0.5, repetition_penalty=3.0, bias=((4, 50.0),))
    together = next_tokens(
        rows, [generation(Sampling()), generation(wild, (4, 5)), generation(Sampling(), alternatives=2)]
    )
    assert torch.equal(rows, before)
    assert [together[0].id, together[2].id] == [int(logits(0).argmax()), int(logits(2).argmax())]
    assert together[1].id == 4
    assert [len(token.alternatives) for token in together] == [0, 0, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": -0.1},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
    ],
)
def test_numbers_outside_of_their_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_logits_that_are_not_numbers_give_a_token_of_the_vocabulary() -> None:
    logits_BV = torch.full((2, 7), torch.nan)
    logits_BV[1] = 0.0
    for token in next_tokens(logits_BV, [generation(Sampling(temperature=1.0, seed=seed)) for seed in (0, 1)]):
        assert 0 <= token.id < 7
