"""Async tensor parallelism: torch's pass finds the collectives of a block, and its operators compute the same.

The operators have kernels for CUDA only. Here a CPU runs the implementations that define their results.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V
from torch.distributed import _symmetric_memory as symmetric_memory
from transformers import LlamaConfig, LlamaForCausalLM

from stoker.errors import CannotRun
from stoker.job.layout import Layout
from stoker.launch.process_pool import Pool
from stoker.models.families import family_of
from stoker.parallel.apply_to_blocks import apply_to_blocks
from stoker.parallel.mesh import Mesh
from stoker.parallel.tensor_parallel.async_tensor import enable_async_tensor
from stoker.parallel.tensor_parallel.tensor import split_tensors

CPU = torch.device("cpu")
WIDTH, TOKENS = 32, 12
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
KERNELS = (symmetric_memory._fused_all_gather_matmul_fallback, symmetric_memory._fused_matmul_reduce_scatter_fallback)


class Graphs:
    """Compiles with all passes of inductor over graphs, but runs their operators one by one, without its compiler."""

    def __init__(self) -> None:
        self.operators: list[Counter[str]] = []

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **settings: Any) -> torch.fx.GraphModule:
        compile_fx.view_to_reshape(graph)
        with torch.no_grad(), V.set_fake_mode(compile_fx.fake_tensor_prop(graph, inputs)):
            post_grad_passes(graph, bool(settings.get("is_inference")))
        graph.recompile()
        self.operators.append(
            Counter(str(node.target).split(".")[1] for node in graph.graph.nodes if "." in str(node.target))
        )
        return graph


def step(block: nn.Module, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The output of a block, and the gradients of its input and its parameters."""
    x_BTD = x_BTD.clone().requires_grad_()
    out_BTD = block(x_BTD, position_embeddings=rotary)
    return [out_BTD.detach(), *torch.autograd.grad(out_BTD.square().sum(), [x_BTD, *block.parameters()])]


def eager_and_async(rows: int) -> tuple[list[Tensor], list[Tensor], list[Counter[str]]]:
    """A block in both ways on a process of two, and the operators of the compiled one, forward and backward."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=8))
    x_BTD = torch.randn(rows, TOKENS, WIDTH)
    rotary = model.model.rotary_emb(x_BTD, torch.arange(TOKENS)[None])
    layout = Layout(tensor=2, sequence=True, async_tensor=True)
    mesh = Mesh(layout, CPU)
    family = family_of(model.config)
    assert family is not None
    split_tensors(model, family, mesh)
    own_BTD = x_BTD.chunk(2, dim=1)[dist.get_rank()]
    expected = step(model.model.layers[0], own_BTD, rotary)

    graphs, library = Graphs(), torch.library.Library("symm_mem", "IMPL")
    for name, kernel in zip(FUSED, KERNELS, strict=True):
        library.impl(name, kernel, "CPU")
    torch.compiler.reset()
    with (
        symmetric_memory._test_mode({mesh.groups["tensor"].group_name}),
        patch.object(dist, "is_nccl_available", lambda: True),
        patch.object(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=graphs.compile)),
    ):
        apply_to_blocks(model, CPU, layout, family, compiled=True)
        return expected, step(model.model.layers[0], own_BTD, rotary), graphs.operators


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_collectives_and_products_of_a_block_become_one_operator(rows: int, pool: Pool) -> None:
    for expected, found, (forward, backward) in pool.run(eager_and_async, rows, world=2, timeout=300):
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted)
        assert [forward[name] for name in FUSED] == [2, 2]
        assert not forward["mm"] and not forward["all_gather_into_tensor"] and not forward["reduce_scatter_tensor"]
        assert backward[FUSED[0]] == 2 and not backward["all_gather_into_tensor"]
        assert backward["reduce_scatter_tensor"] == 2  # of sums of several products


def refused(kind: str) -> str:
    mesh = Mesh(Layout(tensor=2, sequence=True, async_tensor=True), CPU)
    mesh.device = torch.device(kind, dist.get_rank() if kind == "cuda" else None)
    with (
        patch.object(torch.cuda, "device_count", lambda: 2),
        patch.object(torch.cuda, "can_device_access_peer", lambda one, other: False),
        pytest.raises(CannotRun) as caught,
    ):
        enable_async_tensor(mesh)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_devices_that_cannot_access_each_other_are_refused(kind: str, pool: Pool) -> None:
    for message in pool.run(refused, kind, world=2):
        assert "parallel.async_tensor: needs NVIDIA GPUs of one machine" in message
