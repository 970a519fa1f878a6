"""Each optimizer against torch's own or its published formula, on rows that are seen in some of the steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stoker.sparse import Feature, JaggedIds, SparseEmbeddings, TableSettings

IDS, WIDTH, STEPS = 6, 3, 5
TABLE = TableSettings("t", WIDTH, lr=0.1, dtype="float64", init_scale=1.0)


def seen_in(step: int) -> list[int]:
    """Ids of a step: some of them, some twice."""
    return [number for number in range(IDS) if (number + step) % 3] + [step % IDS]


def factors(step: int, ids: list[int]) -> Tensor:
    return torch.randn(len(ids), WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def gradients() -> list[dict[int, Tensor]]:
    """By step, the sum of each row's gradients."""
    found = []
    for step in range(STEPS):
        ids, sums = seen_in(step), dict[int, Tensor]()
        for number, gradient in zip(ids, factors(step, ids), strict=True):
            sums[number] = sums.get(number, torch.zeros(WIDTH, dtype=torch.float64)) + gradient
        found.append(sums)
    return found


def rows_after_training(table: TableSettings, *, falling: bool = False) -> tuple[Tensor, Tensor]:
    """First and last values of all rows, with a constant rate or with one that falls to 0."""
    tables = SparseEmbeddings([table], {"f": Feature("t")}, seed=1)
    with torch.no_grad():
        first = tables({"f": JaggedIds.single(torch.arange(IDS))})["f"]
    tables.discard()
    for step in range(STEPS):
        ids = seen_in(step)
        (tables({"f": JaggedIds.single(torch.tensor(ids))})["f"] * factors(step, ids)).sum().backward()
        tables.apply_gradients(lr_factor=1 - step / (STEPS - 1) if falling else 1.0)
    tables.eval()
    return first, tables({"f": JaggedIds.single(torch.arange(IDS))})["f"].detach()


def torchs_own(table: TableSettings, row: torch.nn.Parameter) -> torch.optim.Optimizer:
    if table.optimizer == "sgd":
        return torch.optim.SGD([row], table.lr, weight_decay=table.weight_decay)
    if table.optimizer == "adam":
        return torch.optim.Adam([row], table.lr, table.betas, table.eps, table.weight_decay)
    return torch.optim.Adagrad(
        [row], table.lr, eps=table.eps, initial_accumulator_value=table.initial, weight_decay=table.weight_decay
    )


def by_torch(table: TableSettings, first: Tensor) -> Tensor:
    """Each row by an optimizer of torch that takes the row's own steps alone."""
    rows = []
    for number in range(IDS):
        row = torch.nn.Parameter(first[number].clone())
        optimizer = torchs_own(table, row)
        for sums in gradients():
            if number in sums:
                row.grad = sums[number]
                optimizer.step()
        rows.append(row.detach())
    return torch.stack(rows)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_rows_are_updated_as_by_torch(optimizer: str, decay: float) -> None:
    table = replace(TABLE, optimizer=optimizer, initial=0.3, betas=(0.8, 0.95), eps=1e-3, weight_decay=decay)
    first, last = rows_after_training(table)
    torch.testing.assert_close(last, by_torch(table, first), rtol=1e-12, atol=1e-12)


def test_sparse_adam_agrees_while_all_rows_are_seen_in_all_steps() -> None:
    tables = SparseEmbeddings([replace(TABLE, optimizer="adam", eps=1e-20)], {"f": Feature("t")}, seed=1)
    ids = JaggedIds.single(torch.arange(IDS))
    with torch.no_grad():
        first = tables({"f": ids})["f"]
    plain = torch.nn.Embedding(IDS, WIDTH, sparse=True, _weight=first.clone())
    optimizer = torch.optim.SparseAdam(plain.parameters(), lr=TABLE.lr, eps=1e-20)  # which it adds elsewhere
    for step in range(STEPS):
        weight = factors(step, list(range(IDS)))
        for rows in (tables({"f": ids})["f"], plain(torch.arange(IDS))):
            (rows * weight).sum().backward()
        tables.apply_gradients(), optimizer.step(), optimizer.zero_grad()
    torch.testing.assert_close(tables.state().tables["t"].values, plain.weight.detach(), rtol=1e-12, atol=1e-12)


def test_row_wise_adagrad_has_one_rate_a_row() -> None:
    first, last = rows_after_training(replace(TABLE, optimizer="rowwise_adagrad", initial=0.2, eps=1e-3))
    expected = first.tolist()
    for number, row in enumerate(expected):
        total = 0.2
        for sums in gradients():
            if number in sums:
                gradient = sums[number].tolist()
                total += sum(g * g for g in gradient) / WIDTH
                for column, g in enumerate(gradient):
                    row[column] -= 0.1 * g / (math.sqrt(total) + 1e-3)
    torch.testing.assert_close(last, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def ftrl(w: float, gradients: list[float], *, alpha: float, beta: float, l1: float, l2: float, n: float) -> float:
    """One coordinate, as algorithm 1 of McMahan et al. (2013) is written."""
    z = -w * ((beta + math.sqrt(n)) / alpha + l2) - math.copysign(l1, w)
    for g in gradients:
        sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / alpha
        z += g - sigma * w
        n += g * g
        w = 0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2)
    return w


@pytest.mark.parametrize("falling", [False, True])
def test_ftrl_is_the_published_algorithm_whatever_the_schedule(falling: bool) -> None:
    table = replace(TABLE, optimizer="ftrl", ftrl_beta=0.5, l1=0.4, l2=0.1, initial=0.2)
    first, last = rows_after_training(table, falling=falling)
    expected = [
        [
            ftrl(
                float(first[number, column]),
                [float(sums[number][column]) for sums in gradients() if number in sums],
                alpha=0.1,
                beta=0.5,
                l1=0.4,
                l2=0.1,
                n=0.2,
            )
            for column in range(WIDTH)
        ]
        for number in range(IDS)
    ]
    torch.testing.assert_close(last, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert (last == 0).any()
    assert (last != 0).any()


def test_ftrl_without_a_denominator_is_refused() -> None:
    with pytest.raises(ValueError, match="ftrl"):
        replace(TABLE, optimizer="ftrl", ftrl_beta=0.0)
