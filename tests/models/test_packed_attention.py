"""Documents packed or padded give the loss and the gradients of the documents one by one, in every family."""

from __future__ import annotations

import copy
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from families import SHAPES, tiny
from stoker.models.attention import packed_attention, packed_row
from stoker.models.attention.collate import Row, Segment
from stoker.models.families import family_of
from stoker.models.language_model import LanguageModel, lay_out_for
from stoker.parallel.recompute import recompute_blocks

CPU = torch.device("cpu")
# Their attention is written out in their own code, or they carry a state along the row. See docs/packing.md.
PADDED = {"falcon", "mamba"}
OLDER = Version(transformers.__version__) < Version("5.23")
PADDED_BEFORE = {"deepseek_v32", "glm_moe_dsa"} if OLDER else set()  # their indexers were others
PADDED |= PADDED_BEFORE
BOUND = 1e-12  # relative, in float64


def own_loss(model: PreTrainedModel, rows: list[Row]) -> Tensor:
    """The summed cross entropy of each document by itself, from the model's own logits."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, trained in rows:
        ids_T = torch.from_numpy(ids.astype(np.int64))
        logits = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1]
        losses = nn.functional.cross_entropy(logits, ids_T[1:], reduction="none")
        total = total + losses[torch.from_numpy(trained[1:])].sum()
    return total


def attending(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its attention in reach, where its family writes it out."""
    family = family_of(model.config)
    if family is not None and family.attend is not None:
        family.attend(model)
    return model


def laid_out_loss(language: LanguageModel, rows: list[Row]) -> float:
    total = 0.0
    for inputs in language.lay_out(rows, CPU):
        with packed_row.segments(inputs.segments):
            loss, _ = language.loss(inputs)
            loss.backward()
        total += float(loss.detach())
    return total


def farthest_gradient(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of a parameter's gradient, relative to the largest gradient."""
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    assert all((p.grad is None) == (q.grad is None) for p, q in pairs)
    pairs = [(p.grad, q.grad) for p, q in pairs if q.grad is not None]
    largest = max(float(q.norm()) for _, q in pairs)
    return max(float((p - q).norm()) for p, q in pairs) / largest


class Waits(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors, for which it waits where these are on a GPU."""

    found = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.found += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "llama", "qwen3", "gemma2", "gemma3_text", "glm4"])
def test_the_host_waits_for_no_number_within_a_pass(family: str, documents: list[Row]) -> None:
    # In training OPT of transformers 5.17 draws a number for each layer, on the host: no wait.
    language = lay_out_for(tiny(family).train(family != "opt"))
    for inputs in language.lay_out(documents, CPU):
        with packed_row.segments(inputs.segments), Waits() as waits:
            loss, _ = language.loss(inputs)
            loss.backward()
        assert waits.found == 0


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.usefixtures("no_float32")
def test_documents_laid_out_together_give_the_sum_of_the_documents(family: str, documents: list[Row]) -> None:
    model = tiny(family)
    reference = copy.deepcopy(model).eval()
    expected = own_loss(reference, documents)
    expected.backward()

    language = lay_out_for(attending(model.eval()))
    total = laid_out_loss(language, documents)

    assert language.packs == (family not in PADDED)
    assert total == pytest.approx(float(expected.detach()), rel=BOUND)
    assert farthest_gradient(model, reference) < BOUND


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bloom", "gpt_neo", "gptj"])
def test_without_segments_the_packed_attention_is_the_models_own(family: str, documents: list[Row]) -> None:
    """Generation and foreign code call the model as it is, with padding on the left and with a cache."""
    model = tiny(family, dtype=torch.float32).eval()
    reference = copy.deepcopy(model)
    assert lay_out_for(attending(model)).packs
    ids = torch.from_numpy(np.stack([ids[:9] for ids, _ in documents]).astype(np.int64))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0

    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        given = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)

    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        model.generate(ids, attention_mask=mask, **options),
        reference.generate(ids, attention_mask=mask, **options),
    )


@pytest.mark.usefixtures("no_float32")
def test_recompute_attends_the_same_in_another_thread(documents: list[Row]) -> None:
    """On a GPU the backward pass, and with it recompute, runs in a thread of autograd's own."""
    model = tiny("llama")
    reference = copy.deepcopy(model)
    own_loss(reference, documents).backward()
    language = lay_out_for(model)
    recompute_blocks(model)

    (inputs,) = language.lay_out(documents, CPU)
    with packed_row.segments(inputs.segments):
        loss, _ = language.loss(inputs)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert farthest_gradient(model, reference) < BOUND


def leaking(module: nn.Module, query: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
    with packed_row.segments(None):
        return packed_attention.packed_attention(module, query, *arguments, **options)


def test_a_model_that_leaks_is_padded(monkeypatch: pytest.MonkeyPatch, documents: list[Row]) -> None:
    model = tiny("llama")
    reference = copy.deepcopy(model)
    with monkeypatch.context() as patch:
        patch.setattr(
            packed_attention,
            "register",
            lambda: packed_attention.AttentionInterface.register(packed_attention.NAME, leaking),
        )
        language = lay_out_for(model)
    packed_attention.register()

    assert not language.packs
    assert laid_out_loss(language, documents) == pytest.approx(float(own_loss(reference, documents).detach()), rel=1e-6)


def test_a_mask_of_all_ones_makes_packing_leak(documents: list[Row]) -> None:
    """Why packed rows carry positions and no mask: with one, transformers does not look for documents."""
    model = tiny("llama", dtype=torch.float32).eval()
    first, second = (torch.from_numpy(ids.astype(np.int64)) for ids, _ in documents[:2])
    row, positions = torch.cat((first, second))[None], torch.cat((torch.arange(24), torch.arange(9)))[None]
    with torch.no_grad():
        alone = model(input_ids=second[None]).logits[0]
        masked = model(input_ids=row, position_ids=positions, attention_mask=torch.ones_like(row)).logits[0, 24:]
    assert not torch.allclose(masked, alone, atol=1e-2)


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention"])
def test_layers_whose_masks_are_not_known_are_padded(kind: str) -> None:
    model = tiny("llama", dtype=torch.float32)
    model.config.layer_types = ["full_attention", kind]
    assert not lay_out_for(model).packs


def test_chunks_count_from_the_beginning_of_a_document() -> None:
    prefix, own, other = Segment(0, 11), Segment(11, 13, 0, 11), Segment(24, 12, 0, 11)
    with packed_row.segments((prefix, own, other)):
        row = packed_row.active_row()
    assert isinstance(row, packed_row.PackedRow)
    cut = packed_row.in_chunks(row, 6)
    assert cut.segments[:5] == (Segment(0, 6), Segment(6, 5), Segment(11, 1, 6, 5), Segment(12, 6), Segment(18, 6))
    assert cut.segments[5:] == (Segment(24, 1, 6, 5), Segment(25, 6), Segment(31, 5))
    assert packed_row.in_chunks(row, 6) is cut and packed_row.in_chunks(row, 24) is row


def test_the_probe_leaves_the_windows_as_they_were() -> None:
    model = tiny("gemma2")
    lay_out_for(model)
    windows = [m.sliding_window for m in model.modules() if hasattr(m, "sliding_window")]
    assert sorted(map(str, windows)) == ["6", "None"] and model.config.sliding_window == 6


def test_dropout_stops_the_sharing_of_beginnings(documents: list[Row]) -> None:
    model = tiny("llama")
    shared = lay_out_for(model.train()).lay_out(documents, CPU)[0].ids.numel()
    model.config.attention_dropout = 0.1
    language = lay_out_for(model)
    assert language.lay_out(documents, CPU)[0].ids.numel() > shared
    language.model.eval()
    assert language.lay_out(documents, CPU)[0].ids.numel() == shared


def test_the_documented_table_is_what_is_tested() -> None:
    text = (Path(__file__).parents[2] / "docs" / "packing.md").read_text()
    documented = dict(re.findall(r"^\| (\w+) \| (packed|padded) \|", text, re.MULTILINE))
    assert documented == {family: "padded" if family in PADDED - PADDED_BEFORE else "packed" for family in SHAPES}
