"""The chunked head and cross entropy against autograd over full logits, in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from families import tiny
from stoker.models import chunked_head, head_functions
from stoker.models.compiled_scores import scores_of_products, slope_of_scores, transform
from stoker.models.head import Head, LogitsHead, head_of
from stoker.models.language_model import lay_out_for

POSITIONS, WIDTH, VOCABULARY = 37, 16, 53
ROWS_A_CHUNK = 5  # 37 positions in eight chunks, the last of them smaller


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_head, "CHUNK_BYTES", 4 * VOCABULARY * ROWS_A_CHUNK)


def full(linear: nn.Linear, hidden: Tensor, targets: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits = linear(hidden) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return nn.functional.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize(("bias", "scale", "softcap"), itertools.product((False, True), (1.0, 0.3), (None, 2.0)))
@pytest.mark.parametrize("frozen", ["nothing", "head", "hidden", "weight"])
def test_loss_and_gradients(bias: bool, scale: float, softcap: float | None, frozen: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=torch.float64)
    hidden = torch.randn(POSITIONS, WIDTH, dtype=torch.float64, requires_grad=frozen != "hidden")
    targets = torch.randint(VOCABULARY, (POSITIONS,))
    linear.weight.requires_grad_(frozen not in ("head", "weight"))
    if bias:
        linear.bias.requires_grad_(frozen != "head")
    leaves = [t for t in (hidden, linear.weight, linear.bias) if t is not None and t.requires_grad]

    expected = full(linear, hidden, targets, scale, softcap)
    expected_grads = torch.autograd.grad(3.0 * expected, leaves)
    loss, correct = Head(linear, scale, softcap).cross_entropy(hidden, targets)
    grads = torch.autograd.grad(3.0 * loss, leaves)

    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    assert int(correct) == int((linear(hidden).argmax(-1) == targets).sum())
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("bias", "scale", "softcap"), itertools.product((False, True), (1.0, 0.3), (None, 2.0)))
@pytest.mark.parametrize(("frozen", "entropy"), itertools.product((False, True), (False, True)))
def test_log_probabilities_entropies_and_their_gradients(
    bias: bool, scale: float, softcap: float | None, frozen: bool, entropy: bool
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=torch.float64).requires_grad_(not frozen)
    hidden = torch.randn(POSITIONS, WIDTH, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCABULARY, (POSITIONS,))
    weights, others = torch.randn(2, POSITIONS, dtype=torch.float64)
    leaves = [t for t in (hidden, linear.weight, linear.bias) if t is not None and t.requires_grad]
    head = Head(linear, scale, softcap)

    log_p = head.logits(hidden).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None]).squeeze(1)
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    expected_loss = (weights * expected).sum().tanh() + entropy * (others * expected_entropy).sum()
    expected_grads = torch.autograd.grad(expected_loss, leaves)
    scores = head.scores(hidden, targets, entropy=entropy, entropy_gradient=entropy)
    loss = (weights * scores.log_probability).sum().tanh()
    if scores.entropy is not None:
        torch.testing.assert_close(scores.entropy, expected_entropy, rtol=1e-12, atol=1e-13)
        loss = loss + (others * scores.entropy).sum()
    grads = torch.autograd.grad(loss, leaves)

    assert (scores.entropy is not None) == entropy
    torch.testing.assert_close(scores.log_probability, expected, rtol=1e-12, atol=1e-13)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("frozen", "products"), [(True, 8), (False, 16)])
def test_scores_under_a_frozen_head_compute_the_logits_once(
    frozen: bool, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for an entropy that is only reported, which has no gradient. A schedule may call the backward pass twice."""
    made = 0
    linear_function = nn.functional.linear

    def counted(*arguments: Tensor) -> Tensor:
        nonlocal made
        made += 1
        return linear_function(*arguments)

    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64).requires_grad_(not frozen)
    hidden = torch.randn(POSITIONS, WIDTH, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(nn.functional, "linear", counted)
    scores = Head(linear).scores(hidden, torch.randint(VOCABULARY, (POSITIONS,)), entropy=True)
    assert scores.entropy is not None and not scores.entropy.requires_grad
    (once,) = torch.autograd.grad(scores.log_probability.sum(), hidden, retain_graph=True)
    assert made == products
    torch.testing.assert_close(torch.autograd.grad(scores.log_probability.sum(), hidden)[0], once, rtol=0, atol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_temperature_divides_the_logits_of_either_head(softcap: float | None) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    hidden, targets = torch.randn(POSITIONS, WIDTH, dtype=torch.float64), torch.randint(VOCABULARY, (POSITIONS,))
    head = Head(linear, 0.3, softcap)
    logits = head.logits(hidden) / 0.7
    log_p = logits.log_softmax(-1)
    right = (logits.argmax(-1) == targets).sum()
    tempered = head.tempered(0.7)
    torch.testing.assert_close(tempered.logits(hidden), logits, rtol=1e-12, atol=0)
    for found, given in ((tempered, hidden), (LogitsHead().tempered(1.4).tempered(0.5), head.logits(hidden))):
        loss, correct = found.cross_entropy(given, targets)
        torch.testing.assert_close(loss, -log_p.gather(1, targets[:, None]).sum(), rtol=1e-12, atol=0)
        assert int(correct) == int(right)
        scores = found.scores(given, targets, entropy=True)
        torch.testing.assert_close(scores.log_probability, log_p.gather(1, targets[:, None])[:, 0], rtol=1e-11, atol=0)
        torch.testing.assert_close(scores.entropy, -(log_p.exp() * log_p).sum(-1), rtol=1e-11, atol=0)


def test_a_tied_head_adds_to_the_embeddings_gradient() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=torch.float64))
    linear = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
    linear.weight = weight
    ids, targets = torch.randint(VOCABULARY, (2, POSITIONS))

    (expected,) = torch.autograd.grad(full(linear, weight[ids].tanh(), targets, 1.0, None), weight)
    (grad,) = torch.autograd.grad(Head(linear).cross_entropy(weight[ids].tanh(), targets)[0], weight)

    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def test_full_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    linear_function = nn.functional.linear

    def watched(*arguments: Tensor) -> Tensor:
        nonlocal largest
        out = linear_function(*arguments)
        largest = max(largest, out.shape[0])
        return out

    monkeypatch.setattr(nn.functional, "linear", watched)
    linear = nn.Linear(WIDTH, VOCABULARY, bias=False)
    Head(linear).cross_entropy(
        torch.randn(POSITIONS, WIDTH, requires_grad=True), torch.zeros(POSITIONS, dtype=torch.long)
    )
    assert largest == ROWS_A_CHUNK


def test_evaluation_computes_no_gradient() -> None:
    linear = nn.Linear(WIDTH, VOCABULARY)
    hidden, targets = torch.randn(POSITIONS, WIDTH), torch.randint(VOCABULARY, (POSITIONS,))
    with torch.no_grad():
        loss, _ = Head(linear).cross_entropy(hidden, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, full(linear, hidden, targets, 1.0, None), rtol=1e-5, atol=0)


def test_no_position_gives_no_loss() -> None:
    linear = nn.Linear(WIDTH, VOCABULARY)
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    loss, correct = Head(linear).cross_entropy(hidden, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert float(loss.detach()) == 0 and int(correct) == 0 and linear.weight.grad is not None
    assert not linear.weight.grad.any()


@pytest.mark.parametrize("family", ["cohere", "granite", "gemma2"])
def test_scales_and_caps_are_read_from_the_configuration(family: str) -> None:
    model = tiny(family, dtype=torch.float32).eval()
    head = head_of(model)
    assert head is not None and (head.scale, head.softcap) != (1.0, None)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        own = model(input_ids=ids).logits
        torch.testing.assert_close(head.logits(model.base_model(input_ids=ids).last_hidden_state), own)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scores", [False, True])
def test_products_have_the_type_of_autocast(low: torch.dtype, scores: bool) -> None:
    torch.manual_seed(0)
    linear, hidden = nn.Linear(WIDTH, VOCABULARY), torch.randn(POSITIONS, WIDTH, requires_grad=True)
    targets = torch.randint(VOCABULARY, (POSITIONS,))

    def results(head: Head | None, scale: float) -> list[Tensor]:
        if head is None:
            loss = nn.functional.cross_entropy(linear(hidden).float(), targets, reduction="sum")
        elif scores:
            loss = -head.scores(hidden, targets).log_probability.sum()
        else:
            loss = head.cross_entropy(hidden, targets)[0]
        found = torch.autograd.grad(loss * scale, [hidden, linear.weight])
        return [loss.detach(), *(grad / scale for grad in found)]

    exact = results(None, 1.0)
    with torch.autocast("cpu", low):
        multiplied = results(Head(linear), 1024.0)
        tolerance = 4 * torch.finfo(low).eps
        torch.testing.assert_close(multiplied, results(None, 1024.0), rtol=tolerance, atol=tolerance)
    assert all(0 < (a - b).norm() / b.norm() < tolerance for a, b in zip(multiplied, exact, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float32, 2.0), (torch.bfloat16, None)])
def test_the_compiled_cross_entropy_is_the_eager_one(dtype: torch.dtype, softcap: float | None) -> None:
    """With one compilation for chunks of any number of rows, and a second one without gradients."""
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    hidden = torch.randn(POSITIONS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (POSITIONS,))
    leaves = [hidden, linear.weight, linear.bias]
    head = Head(linear, 0.3, softcap)

    def results(head: Head) -> list[Tensor]:
        loss, correct = head.cross_entropy(hidden, targets)
        return [loss.detach(), correct, *torch.autograd.grad(loss, leaves)]

    torch.compiler.reset()
    counters.clear()
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(results(replace(head, compiled=True)), results(head), rtol=rtol, atol=rtol / 10)
    with torch.no_grad():
        loss, _ = replace(head, compiled=True).cross_entropy(hidden, targets)
        torch.testing.assert_close(loss, head.cross_entropy(hidden, targets)[0], rtol=1e-5, atol=0)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(("frozen", "softcap", "temperature"), [(True, None, 1.0), (False, 2.0, 0.7)])
def test_compiled_scores_are_the_eager_ones(frozen: bool, softcap: float | None, temperature: float) -> None:
    """With one compilation of each pass for any number of positions. A chunk of one position is not compiled."""
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY).requires_grad_(not frozen)
    head = Head(linear, 0.3, softcap)

    def results(head: Head, hidden: Tensor, targets: Tensor) -> list[Tensor]:
        scores = head.tempered(temperature).scores(hidden, targets, entropy=True, entropy_gradient=not frozen)
        assert scores.entropy is not None
        factors = torch.arange(len(targets)) - 3.0
        loss = (factors * scores.log_probability).sum() + (0 if frozen else (factors * scores.entropy).sum())
        leaves = [x for x in (hidden, linear.weight, linear.bias) if x.requires_grad]
        return [scores.log_probability.detach(), scores.entropy.detach(), *torch.autograd.grad(loss, leaves)]

    torch.compiler.reset()
    counters.clear()
    for positions in (POSITIONS, 36, 1):  # the last chunk of 36 has one position
        hidden, targets = torch.randn(positions, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (positions,))
        eager = results(head, hidden, targets)
        for found, expected in zip(results(replace(head, compiled=True), hidden, targets), eager, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert counters["stats"]["unique_graphs"] == (1 if frozen else 2) and not counters["graph_break"]


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_functions_that_are_compiled_equal_autograd(softcap: float | None) -> None:
    torch.manual_seed(0)
    products = torch.randn(POSITIONS, VOCABULARY, dtype=torch.float64, requires_grad=True)
    targets, (of_log_p, of_entropy) = torch.randint(VOCABULARY, (POSITIONS,)), torch.randn(2, POSITIONS).double()
    logits = transform(products * 0.3, softcap)
    log_p_V = logits.log_softmax(-1)
    log_p, entropy = log_p_V.gather(1, targets[:, None])[:, 0], -(log_p_V.exp() * log_p_V).sum(-1)
    right = logits.argmax(-1) == targets
    (slope,) = torch.autograd.grad(-log_p.sum(), products, retain_graph=True)
    (of_both,) = torch.autograd.grad((of_log_p * log_p + of_entropy * entropy).sum(), products)

    given = products.detach(), targets, 0.3, softcap
    found = scores_of_products(*given, entropy=True, slope=True, summed=False)
    torch.testing.assert_close(found, (log_p.detach(), right, entropy.detach(), slope), rtol=1e-12, atol=1e-14)
    loss, correct, *_ = scores_of_products(*given, entropy=False, slope=False, summed=True)
    torch.testing.assert_close((loss, correct), (log_p.detach().sum(), right.sum()), rtol=1e-12, atol=0)
    both = slope_of_scores(*given, of_log_p, entropy.detach(), of_entropy)
    torch.testing.assert_close(both, of_both, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("most", "rows"), [(255, 255), (256, 256), (700, 512)])
def test_large_chunks_are_whole_tiles(most: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_head, "CHUNK_BYTES", 4 * VOCABULARY * most)
    form = chunked_head.LogitForm(1.0, None, None)
    parts = list(chunked_head._parts(torch.zeros(1000, WIDTH), torch.zeros(VOCABULARY, WIDTH), form))
    assert parts[0] == slice(0, rows) and parts[-1].stop >= 1000


@pytest.mark.parametrize("compiled", [False, True])
def test_the_head_is_compiled_with_the_blocks(compiled: bool) -> None:
    head = lay_out_for(tiny("llama").eval(), compiled=compiled).head
    assert head is not None and head.compiled == compiled


@pytest.mark.parametrize("nvidia", [True, False])
def test_products_that_sum_in_float32_are_asked_of_nvidias_gpus_only(
    nvidia: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the factors are converted first."""
    linear, hidden_ND = nn.Linear(8, 16), torch.randn(5, 8, dtype=torch.bfloat16)
    asked = []
    monkeypatch.setattr(torch, "addmm", lambda *_, out_dtype, **__: asked.append(out_dtype))
    monkeypatch.setattr(head_functions, "is_nvidia", lambda _: nvidia)
    Head(linear).cross_entropy(hidden_ND, torch.arange(5))[0].backward()
    assert asked == [torch.float32, torch.float32] * nvidia  # of the weight and of the bias
    assert bool(linear.weight.grad.any()) != nvidia  # type: ignore[union-attr]
