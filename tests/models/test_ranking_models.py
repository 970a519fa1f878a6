"""Each ranking model against its formula, written out row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stoker.models.ranking.build import MODELS
from stoker.models.ranking.dcn import DCN
from stoker.models.ranking.deepfm import DeepFM
from stoker.models.ranking.din import DIN
from stoker.models.ranking.dlrm import DLRM
from stoker.models.ranking.esmm import ESMM, logit_of_both
from stoker.models.ranking.mmoe import MMoE
from stoker.models.ranking.model_inputs import FIRST_ORDER, RankingInputs, RankingShape
from stoker.models.ranking.ple import PLE
from stoker.models.ranking.two_tower import TwoTower
from stoker.models.ranking.wide_deep import WideDeep

B, D, N, L = 5, 4, 3, 6
NAMES = ("user", "item", "city")
SHAPE = RankingShape(NAMES, numbers=N, width=D, hidden=(8, 7), item=("item", "city"), layers=2, experts=3)


@pytest.fixture
def inputs() -> RankingInputs:
    torch.manual_seed(0)
    vectors = {name: torch.randn(B, D, dtype=torch.float64) for name in NAMES}
    vectors |= {name + FIRST_ORDER: torch.randn(B, 1, dtype=torch.float64) for name in NAMES}
    lengths = torch.tensor([0, 1, 3, 6, 2])
    history = torch.randn(B, L, D, dtype=torch.float64) * (torch.arange(L) < lengths[:, None])[:, :, None]
    dense = torch.randn(B, N, dtype=torch.float64)
    return RankingInputs({**vectors, "history": history}, {"history": lengths}, dense)


def by_rows(tower: nn.Sequential, rows: Tensor) -> Tensor:
    """A tower, layer by layer."""
    for layer in tower:
        rows = rows @ layer.weight.T + layer.bias if isinstance(layer, nn.Linear) else rows.clamp(min=0)
    return rows


def side_by_side(inputs: RankingInputs) -> Tensor:
    return torch.cat([inputs.vectors["user"], inputs.vectors["item"], inputs.vectors["city"], inputs.dense], 1)


def test_dlrm(inputs: RankingInputs) -> None:
    model = DLRM(SHAPE).double()
    assert model.bottom is not None
    bottom = by_rows(model.bottom, inputs.dense)
    vectors = [bottom, *(inputs.vectors[name] for name in NAMES)]
    products = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    expected = by_rows(model.top, torch.cat([bottom, torch.stack(products, 1)], 1))
    torch.testing.assert_close(model(inputs), expected)


def test_dlrm_without_numbers(inputs: RankingInputs) -> None:
    model = DLRM(replace(SHAPE, numbers=0)).double()
    vectors = [inputs.vectors[name] for name in NAMES]
    products = [(vectors[i] * vectors[j]).sum(1) for i in range(3) for j in range(i)]
    expected = by_rows(model.top, torch.stack(products, 1))
    torch.testing.assert_close(model(replace(inputs, dense=inputs.dense[:, :0])), expected)


def test_dcn(inputs: RankingInputs) -> None:
    model = DCN(SHAPE).double()
    first = side_by_side(inputs)
    crossed = first
    for cross in model.crosses:
        crossed = first * (crossed @ cross.weight.T + cross.bias) + crossed
    both = torch.cat([crossed, by_rows(model.deep, first)], 1)
    torch.testing.assert_close(model(inputs), both @ model.head.weight.T + model.head.bias)


def test_deepfm(inputs: RankingInputs) -> None:
    model = DeepFM(SHAPE).double()
    assert model.linear is not None
    pairs = sum(
        (inputs.vectors[a] * inputs.vectors[b]).sum(1)
        for a, b in (("user", "item"), ("user", "city"), ("item", "city"))
    )
    once = sum(inputs.vectors[name + FIRST_ORDER] for name in NAMES) + model.linear(inputs.dense)
    assert isinstance(pairs, Tensor)
    torch.testing.assert_close(
        model(inputs), once + pairs[:, None] + by_rows(model.deep, side_by_side(inputs)) + model.bias
    )


def test_wide_deep(inputs: RankingInputs) -> None:
    model = WideDeep(SHAPE).double()
    assert model.wide is not None
    once = sum(inputs.vectors[name + FIRST_ORDER] for name in NAMES) + model.wide(inputs.dense)
    torch.testing.assert_close(model(inputs), once + by_rows(model.deep, side_by_side(inputs)) + model.bias)


def test_din_weighs_each_id_of_a_history(inputs: RankingInputs) -> None:
    model = DIN(replace(SHAPE, sequences={"history": "item"})).double()
    unit = model.units["0"]
    assert isinstance(unit, nn.Sequential)
    interests = torch.zeros(B, D, dtype=torch.float64)
    for row, length in enumerate(inputs.lengths["history"].tolist()):
        item = inputs.vectors["item"][row]
        for at in range(length):
            seen = inputs.vectors["history"][row, at]
            interests[row] += by_rows(unit, torch.cat([seen, item, seen - item, seen * item])[None])[0, 0] * seen
    torch.testing.assert_close(model(inputs), by_rows(model.top, torch.cat([side_by_side(inputs), interests], 1)))


def test_mmoe_has_a_gate_a_label(inputs: RankingInputs) -> None:
    model = MMoE(replace(SHAPE, labels=2)).double()
    rows = side_by_side(inputs)
    expected = []
    for gate, tower in zip(model.gates, model.towers, strict=True):
        shares = torch.softmax(rows @ gate.weight.T, 1)
        mixed = sum(shares[:, [n]] * by_rows(expert, rows) for n, expert in enumerate(model.experts))
        assert isinstance(tower, nn.Sequential)
        assert isinstance(mixed, Tensor)
        expected.append(by_rows(tower, mixed))
    torch.testing.assert_close(model(inputs), torch.cat(expected, 1))


@pytest.mark.parametrize("levels", [1, 3])
def test_ple_weighs_experts_of_each_label_and_shared_ones_level_by_level(levels: int, inputs: RankingInputs) -> None:
    model = PLE(replace(SHAPE, labels=2, levels=levels)).double()

    def mixed(gate: nn.Linear, own: Tensor, experts: list[Tensor]) -> Tensor:
        shares = torch.softmax(own @ gate.weight.T, 1)
        return torch.stack([shares[:, [n]] * expert for n, expert in enumerate(experts)]).sum(0)

    first = second = shared = side_by_side(inputs)
    for level in model.levels:
        of_first, of_second, of_both = (
            [by_rows(expert, own) for expert in level.experts[3 * n : 3 * n + 3]]
            for n, own in enumerate((first, second, shared))
        )
        gates = list(level.gates)
        if level is not model.levels[-1]:
            shared = mixed(gates.pop(), shared, [*of_first, *of_second, *of_both])
        first, second = mixed(gates[0], first, of_first + of_both), mixed(gates[1], second, of_second + of_both)
        assert len(gates) == 2
    expected = torch.cat([by_rows(t, own) for t, own in zip(model.towers, (first, second), strict=True)], 1)
    found = model(inputs)
    torch.testing.assert_close(found, expected)
    labels = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0], [1, 1]], dtype=torch.float64)
    ours, theirs = (nn.functional.binary_cross_entropy_with_logits(each, labels) for each in (found, expected))
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(each, list(model.parameters())) for each in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert all(gradient.any() for gradient in gradients[0])


def test_esmm_trains_the_product_of_its_probabilities(inputs: RankingInputs) -> None:
    model = ESMM(replace(SHAPE, labels=2)).double()
    labels = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 0], [1, 1]], dtype=torch.float64)
    rows = side_by_side(inputs)
    click, given = (by_rows(tower, rows)[:, 0].sigmoid() for tower in (model.click, model.conversion))
    expected = torch.stack([click, click * given, given], 1)
    found = model(inputs)
    torch.testing.assert_close(found.sigmoid(), expected)
    loss = nn.functional.binary_cross_entropy(expected[:, :2], labels)
    by_logits = nn.functional.binary_cross_entropy_with_logits(found[:, :2], labels)
    torch.testing.assert_close(by_logits, loss)
    ours, theirs = (torch.autograd.grad(each, list(model.parameters())) for each in (by_logits, loss))
    torch.testing.assert_close(ours, theirs)


def test_the_logit_of_both_is_exact_where_a_product_of_sigmoids_is_0_or_1() -> None:
    values = torch.tensor([-300.0, -90.0, -20.0, -1.0, 0.0, 2.0, 20.0, 90.0], dtype=torch.float64)
    a, b = torch.cartesian_prod(values, values).T
    log_p = torch.nn.functional.logsigmoid(a) + torch.nn.functional.logsigmoid(b)
    log_not_p = torch.where(log_p < -1, torch.log1p(-log_p.exp()), torch.log(-torch.expm1(log_p)))
    positive, negative = (
        nn.functional.binary_cross_entropy_with_logits(
            logit_of_both(a.float(), b.float()), torch.full((len(a),), label), reduction="none"
        )
        for label in (1.0, 0.0)
    )
    torch.testing.assert_close(positive.double(), -log_p, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(negative.double(), -log_not_p, rtol=1e-6, atol=1e-6)
    assert logit_of_both(a.bfloat16(), b.bfloat16()).dtype == torch.float32


def test_two_tower_is_a_cosine(inputs: RankingInputs) -> None:
    model = TwoTower(SHAPE).double()
    user = by_rows(model.user, torch.cat([inputs.vectors["user"], inputs.dense], 1))
    item = by_rows(model.item, torch.cat([inputs.vectors["item"], inputs.vectors["city"]], 1))
    cosine = torch.nn.functional.cosine_similarity(user, item)
    torch.testing.assert_close(model(inputs), cosine[:, None] * model.log_scale.exp() + model.bias)
    torch.testing.assert_close(model.item_vectors(inputs).norm(dim=1), torch.ones(B, dtype=torch.float64))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_a_logit_a_label_and_a_gradient_to_every_vector(name: str, inputs: RankingInputs) -> None:
    labels = {"two-tower": 1, "esmm": 2}.get(name, 3)
    model = MODELS[name](replace(SHAPE, labels=labels, sequences={"history": "item"} if name == "din" else {})).double()
    vectors = {key: value.clone().requires_grad_() for key, value in inputs.vectors.items()}
    out = model(replace(inputs, vectors=vectors))
    assert out.shape == (B, 3 if name == "esmm" else labels)
    out.square().sum().backward()
    used = [*NAMES, *(name + FIRST_ORDER for name in NAMES if getattr(model, "first_order", False))]
    for key in (*used, *(["history"] if name == "din" else [])):
        assert vectors[key].grad is not None, key
        assert vectors[key].grad.abs().sum() > 0, key
