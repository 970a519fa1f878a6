"""The routers' auxiliary loss against transformers' own and against documents one by one, in every kind of row."""

from __future__ import annotations

import copy
import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    PreTrainedModel,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from families import tiny
from stoker.models import router_balance
from stoker.models.attention import packed_row
from stoker.models.attention.collate import Row
from stoker.models.language_model import LanguageModel, lay_out_for
from stoker.models.router_balance import chooses_otherwise, hook_routers, routers_of
from stoker.parallel.recompute import recompute_blocks

CPU = torch.device("cpu")
COEFFICIENT = 0.3
MIXTURES = (
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "olmoe",
    "granitemoe",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "llama4_text",
    "gemma4_text",
)


def documents() -> list[Row]:
    """Documents of which two begin alike, one is that beginning with a token more, and one has a few trained tokens."""
    generator = np.random.default_rng(3)
    a, b, c, d = (generator.integers(2, 90, length).astype(np.uint32) for length in (19, 23, 11, 17))
    b[:10], c[:10] = a[:10], a[:10]
    trained = [np.ones(len(ids), bool) for ids in (a, b, c, d)]
    trained[3][:12] = False
    return list(zip((a, b, c, d), trained, strict=True))


def logits_in(output: Any, place: int) -> Tensor:
    """The logits in a router's output; a product (Gemma 4) has nothing else."""
    return output if isinstance(output, Tensor) else output[place]


def own_balance(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The mean over the layers of E sum f P, written out, of one document."""
    logits: list[Tensor] = []
    with ExitStack() as hooks:
        for router, place in routers_of(model).items():
            hook = router.register_forward_hook(lambda _, __, out, place=place: logits.append(logits_in(out, place)))
            hooks.callback(hook.remove)
        model(input_ids=ids[None], use_cache=False)
    each = []
    for layer_TE in logits:
        p_TE = layer_TE.flatten(0, -2).softmax(-1)
        chosen_TK = p_TE.topk(2).indices
        assert 2 in (getattr(model.config, key, None) for key in router_balance.CHOSEN)
        f_E = nn.functional.one_hot(chosen_TK, p_TE.shape[1]).sum(1).double().mean(0)
        each.append(p_TE.shape[1] * (f_E * p_TE.mean(0)).sum())
    return torch.stack(each).mean()


def expected_gradients(model: PreTrainedModel, rows: list[Row], weight: float | None) -> dict[str, Tensor]:
    total = torch.zeros((), dtype=torch.float64)
    for ids, trained in rows:
        ids_T = torch.from_numpy(ids.astype(np.int64))
        wanted_T = torch.from_numpy(trained[1:])
        logits = model(input_ids=ids_T[None, :-1], use_cache=False).logits[0]
        total = total + nn.functional.cross_entropy(logits, ids_T[1:], reduction="none")[wanted_T].sum()
        total = total + COEFFICIENT * (wanted_T.sum() if weight is None else weight) * own_balance(model, ids_T[:-1])
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(language: LanguageModel, rows: list[Row], weight: float | None) -> dict[str, Tensor]:
    for inputs in (replace(inputs, balance=weight) for inputs in language.lay_out(rows, CPU)):
        with packed_row.segments(inputs.segments):
            language.loss(inputs).total.backward()
    return {name: p.grad for name, p in language.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.often("mixtral", "qwen3_moe", "gpt_oss")
@pytest.mark.parametrize(
    ("how", "weight"), [("packed", None), ("padded", None), ("recomputed", None), ("packed", 0.5), ("padded", 0.0)]
)
def test_gradients_are_those_of_documents_one_by_one(family: str, how: str, weight: float | None) -> None:
    model = tiny(family).double()
    reference = copy.deepcopy(model)
    language = lay_out_for(model, hook_routers(model, COEFFICIENT))
    if how == "recomputed":
        recompute_blocks(model)
    if how == "padded":
        # Gemma 4's own attention casts a mask of float64 to float32, where padding that sees no key is NaN.
        model.set_attn_implementation("sdpa" if family == "gemma4_text" else "eager")
        language = LanguageModel(model, language.head, False, (), language.balance)
    expected = expected_gradients(reference, documents(), weight)
    found = gradients(language, documents(), weight)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()) + 1e-9)


def test_one_document_and_layer_give_what_transformers_computes() -> None:
    model = tiny("mixtral").double()
    (router, place), *_ = routers_of(model).items()
    seen: list[Tensor] = []
    router.register_forward_hook(lambda _, __, out: seen.append(out[place]))
    ids = torch.from_numpy(documents()[0][0].astype(np.int64))
    for other in list(model.model.layers)[1:]:
        model.model.layers = nn.ModuleList(layer for layer in model.model.layers if layer is not other)
    own = own_balance(model, ids)
    config = model.config
    theirs = load_balancing_loss_func((seen[0],), config.num_local_experts, config.num_experts_per_tok)
    torch.testing.assert_close(own.float(), theirs, rtol=1e-5, atol=0)


def test_the_loss_that_is_shown_is_cross_entropy_alone() -> None:
    model = tiny("mixtral").double()
    language = lay_out_for(model, hook_routers(model, COEFFICIENT))
    plain = LanguageModel(model, language.head, language.packs)
    (inputs,) = language.lay_out(documents(), CPU)
    with packed_row.segments(inputs.segments):
        assert float(language.loss(inputs).total) == float(plain.loss(inputs).total)


def test_recomputed_activations_of_a_block_are_freed_with_its_backward_pass() -> None:
    model = tiny("mixtral")
    marks: list[weakref.ref[object]] = []
    alive: list[list[bool]] = []

    class Mark:
        pass

    class Marked(torch.autograd.Function):
        """The identity, with an object that lives as long as the graph."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            alive.append([mark() is not None for mark in marks])
            ctx.mark = Mark()
            marks.append(weakref.ref(ctx.mark))
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    for router, place in routers_of(model).items():
        router.register_forward_hook(
            lambda _, __, out, place=place: (*out[:place], Marked.apply(out[place]), *out[place + 1 :])
        )
    language = lay_out_for(model, hook_routers(model, COEFFICIENT))
    recompute_blocks(model)
    gradients(language, documents()[:1], None)
    assert alive[-1][-3:] == [True, True, False]  # the passes of both blocks, and the other one computed again


def mixture(kind: Any, config: Any, **changes: Any) -> PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 16, "moe_intermediate_size": 8, "intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    return kind(config(**sizes, **heads, **changes))


def test_routers_that_choose_otherwise_are_known() -> None:
    glm = mixture(Glm4MoeForCausalLM, Glm4MoeConfig, n_routed_experts=4)
    minimax = mixture(MiniMaxM2ForCausalLM, MiniMaxM2Config, num_local_experts=4)
    ernie = mixture(Ernie4_5_MoeForCausalLM, Ernie4_5_MoeConfig, moe_num_experts=4, moe_k=2)
    assert chooses_otherwise(glm) and chooses_otherwise(minimax)
    assert routers_of(ernie) and not chooses_otherwise(ernie)
    assert not chooses_otherwise(tiny("mixtral")) and not chooses_otherwise(tiny("llama"))


def test_one_number_of_chosen_experts_for_each_layer() -> None:
    balance = hook_routers(tiny("hunyuan_v1_moe", moe_topk=[2, 2]), COEFFICIENT)
    assert balance is not None and balance.chosen == 2


def test_dense_models_have_no_routers() -> None:
    assert hook_routers(tiny("llama"), COEFFICIENT) is None
    assert hook_routers(tiny("mixtral"), 0.0) is None


def test_what_a_pass_copies_to_the_device_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for a copy from pageable memory, and for all work of the device before it."""
    copied: list[torch.Size] = []

    def copying(values: Tensor, device: torch.device) -> Tensor:
        copied.append(values.shape)
        return values.to(device)

    monkeypatch.setattr(router_balance, "on_device", copying)
    model: Any = tiny("mixtral", dtype=torch.float32)
    language = lay_out_for(model, hook_routers(model, COEFFICIENT))
    [inputs] = language.lay_out(documents(), CPU)
    assert inputs.segments is not None
    with packed_row.row_of(inputs):
        language.loss(inputs)
    assert copied == [(inputs.ids.numel(),), (inputs.rows, len(inputs.segments))]
