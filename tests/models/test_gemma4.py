"""Small Gemma 4 models: embeddings for every block, and blocks that use keys and values of earlier ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_packed_attention import BOUND, farthest_gradient, laid_out_loss, own_loss

from families import SMALL_GEMMA4, tiny
from stoker.errors import UserError
from stoker.generate.decoder import decoder_of
from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.request import Request
from stoker.hardware.process_device import Device
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.attention.attention_kernels import Heads, heads_of
from stoker.models.attention.collate import Row
from stoker.models.language_model import lay_out_for
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.virtual_tokens import FirstValues, add_virtual_tokens
from stoker.parallel.recompute import recompute_blocks

EXACT = Device("cpu", "fp64", "a test compares")


def small(**changes: Any) -> Any:
    return tiny("gemma4_text", **{**SMALL_GEMMA4, **changes})


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.usefixtures("no_float32")
def test_packed_documents_give_the_sum_of_the_documents(recomputed: bool, documents: list[Row]) -> None:
    model = small().eval()
    reference = copy.deepcopy(model)
    expected = own_loss(reference, documents)
    expected.backward()
    language = lay_out_for(model)
    if recomputed:
        recompute_blocks(model)
    assert language.packs
    assert laid_out_loss(language, documents) == pytest.approx(float(expected.detach()), rel=BOUND)
    assert farthest_gradient(model, reference) < BOUND


@pytest.mark.parametrize("paged", [False, True])
def test_answers_are_those_of_transformers(paged: bool) -> None:
    model = small(max_position_embeddings=256).eval()
    tuned = copy.deepcopy(model)
    training_form(tuned)
    engine = GenerationEngine(decoder_of(tuned, EXACT, context=200), paged=paged)
    prompts = [tuple(range(3, 3 + length)) for length in (5, 17, 1, 40)]
    for answer in engine.run([Request(prompt, 12, remember=True) for prompt in prompts]):
        ids = torch.tensor([answer.request.prompt])
        alone = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert answer.ids == alone[0, ids.shape[1] :].tolist()
    again = engine.run([Request((*prompts[3], 9), 5)])[0]  # keys and values of its beginning are in memory
    assert again.shared > 0
    alone = model.generate(
        torch.tensor([again.request.prompt]), max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert again.ids == alone[0, len(again.request.prompt) :].tolist()


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("prefix", {"num_kv_shared_layers": 0}, "a prefix has keys and values of one size in all layers"),
        ("prompt", {}, "virtual tokens have no such rows"),
    ],
)
def test_virtual_tokens_that_a_model_cannot_have_are_refused(
    method: str, changes: dict[str, Any], message: str
) -> None:
    tune = TuneBlock.model_validate({"method": method, "tokens": 4})
    model = small(**changes)
    reader = FirstValues(lambda ids: model.get_input_embeddings().weight[list(ids)], None)
    with pytest.raises(UserError, match=message):
        add_virtual_tokens(model, tune, reader, seed=0)


def test_kernels_are_measured_with_the_heads_of_the_first_layers() -> None:
    """Layers with full attention have others."""
    assert heads_of(small().config, 1) == Heads(4, 2, 8)
