"""Indexers select among the keys of a document, in packed rows and in generation."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from test_packed_attention import PADDED, farthest_gradient, laid_out_loss, own_loss

from families import tiny
from stoker.models.attention import packed_row, selected_keys
from stoker.models.attention.collate import Row, pack
from stoker.models.language_model import lay_out_for
from stoker.models.prepare_architecture import training_form
from stoker.parallel.recompute import recompute_blocks

pytestmark = pytest.mark.skipif("glm_moe_dsa" in PADDED, reason="this transformers has other indexers: rows are padded")

CPU = torch.device("cpu")
FAMILIES = ["deepseek_v32", "glm_moe_dsa"]


def trained(family: str, **changes: Any) -> Any:
    model = tiny(family, **changes).eval()
    training_form(model)
    return model


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.usefixtures("no_float32")
def test_scores_of_some_queries_at_a_time_select_the_same(
    queries: int, documents: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = trained("glm_moe_dsa"), tiny("glm_moe_dsa").eval()
    own_loss(reference, documents).backward()
    language = lay_out_for(model)
    monkeypatch.setattr(selected_keys, "SCORES", queries * 16 * 24)  # of 16 heads and 24 keys
    laid_out_loss(language, documents)
    assert language.packs and farthest_gradient(model, reference) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("no_float32")
def test_recompute_selects_again(family: str, documents: list[Row]) -> None:
    model, reference = trained(family), tiny(family).eval()
    own_loss(reference, documents).backward()
    language = lay_out_for(model)
    recompute_blocks(model)
    laid_out_loss(language, documents)
    assert farthest_gradient(model, reference) < 1e-12


def test_documents_with_no_more_keys_than_are_selected_need_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("deepseek_v32", index_topk=8)
    language = lay_out_for(model)
    scored: list[int] = []
    of_document = selected_keys._of_document
    monkeypatch.setattr(
        selected_keys, "_of_document", lambda i, inputs: scored.append(inputs[0].shape[1]) or of_document(i, inputs)
    )
    rows = [(np.arange(2, 2 + length).astype(np.uint32), np.ones(length, bool)) for length in (9, 10, 5)]
    inputs = pack(rows, CPU, share=False)
    with packed_row.row_of(inputs), torch.no_grad():
        language.loss(inputs)
    assert scored == [9, 9]  # of the second document, whose last token is only a target, in two layers


def test_the_selection_matters(documents: list[Row]) -> None:
    few, all_keys = (trained("deepseek_v32", index_topk=keys) for keys in (7, 64))
    with torch.no_grad():
        assert float(own_loss(few, documents)) != pytest.approx(float(own_loss(all_keys, documents)), rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_indexers_are_frozen(family: str, documents: list[Row]) -> None:
    model = trained(family)
    laid_out_loss(lay_out_for(model), documents)
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {name for name, p in model.named_parameters() if not p.requires_grad}
    assert without and all(".indexer." in name for name in without)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_is_the_models_own(family: str) -> None:
    """Generation and foreign code call the model without a row, with padding on the left."""
    model, reference = trained(family), tiny(family).eval()
    assert lay_out_for(model).packs
    ids = torch.from_numpy(np.random.default_rng(0).integers(2, 128, (3, 20)))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        given, expected = (m(input_ids=ids, attention_mask=mask).logits[mask.bool()] for m in (model, reference))
    torch.testing.assert_close(given, expected)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    own = copy.deepcopy(reference)
    assert torch.equal(
        model.generate(ids, attention_mask=mask, **options), own.generate(ids, attention_mask=mask, **options)
    )
