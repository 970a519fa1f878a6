"""Offloaded activations: the same bits however late copies are, and two blocks' activations on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from late_copies import LateCopies
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from stoker.errors import UserError
from stoker.job.layout import Layout
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.models.blocks import blocks_of
from stoker.models.families import family_of
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.lora import fuse_lora
from stoker.parallel.compile import compile_blocks
from stoker.parallel.data_parallel.plain_module import spread_module
from stoker.parallel.mesh import Mesh
from stoker.parallel.offload import activation_offload
from stoker.parallel.offload.activation_offload import _HostMemory, offload_activations
from stoker.parallel.offload.copy_stream import Wait
from stoker.parallel.recompute import recompute_blocks
from stoker.verify.layout_cases import Cell
from stoker.verify.toy_job import make_twin
from stoker.verify.verifier import Verifier

BLOCKS = 4
CPU = torch.device("cpu")
IDS = torch.arange(2, 42).view(2, 20)


class OnlyBytes(LateCopies):
    """Late copies that do not keep the memory alive: as a stream, which would read what follows there."""

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Wait:
        wait = super().begin(pairs)
        self._weak = [tuple(StorageWeakRef(t.untyped_storage()) for t in pair) for pair in self._pending]
        self._places = [tuple((t.storage_offset(), t.numel()) for t in pair) for pair in self._pending]
        self._pending = []
        return wait

    def precede_device(self) -> None:
        for refs, places in zip(self._weak, self._places, strict=True):
            assert not any(ref.expired() for ref in refs), "freed before it was copied"
            target, source = (
                torch.empty(0, dtype=torch.uint8).set_(
                    torch.UntypedStorage._new_with_weak_ptr(ref.cdata), start, (size,), (1,)
                )
                for ref, (start, size) in zip(refs, places, strict=True)
            )
            target.copy_(source)
        self._weak, self._places = [], []
        super().precede_device()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large enough to be copied, most of it in several pieces."""
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1)
    monkeypatch.setattr(activation_offload, "PIECE_BYTES", 1 << 10)


def llama(dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        intermediate_size=48,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config).train()


def gradients(model: nn.Module, *, bf16: bool = False) -> list[Tensor]:
    """The gradients of two micro-batches."""
    model.zero_grad()
    torch.manual_seed(1)
    for ids in (IDS, IDS.flip(0)[:, :12]):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compiled(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compile_blocks(model)
    monkeypatch.undo()
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1)


@pytest.mark.parametrize("which", ["none", "full", "selective", "compiled"])
@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_those_without_offload_however_late_copies_are(
    which: str, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(dropout=0.0 if which == "compiled" else 0.2)
    if which == "selective":
        recompute_blocks(model, "selective", family_of(model.config))
    elif which == "full":
        recompute_blocks(model)
    elif which == "compiled":
        compiled(model, monkeypatch)
    expected = gradients(model, bf16=bf16)
    log: list[str] = []
    ways = iter(("down", "up"))
    assert offload_activations(model, CPU, lambda _: OnlyBytes(log, next(ways))) == BLOCKS
    for _ in range(2):  # the second time into the same host memory
        assert all(map(torch.equal, gradients(model, bf16=bf16), expected))
    assert log == (["down begins"] * (BLOCKS - 1) + ["up begins"] * (BLOCKS - 1)) * 4


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_adapters_beside_evaluations_failures_and_other_passes(recompute: str) -> None:
    """LoRA under autocast; a pass without gradients, one that fails, and one that is never used come between."""
    model = llama()
    training_form(model)
    fuse_lora(get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)))
    if recompute == "full":
        recompute_blocks(model)
    expected = gradients(model, bf16=True)
    log: list[str] = []
    ways = iter(("down", "up"))
    offload_activations(model, torch.device("cpu", 0), lambda _: OnlyBytes(log, next(ways)))
    last = blocks_of(model)[-1]
    for _ in range(2):
        with torch.no_grad():
            model(input_ids=IDS, use_cache=False)
        assert not log, "nothing is saved, and nothing leaves"
        failing = last.register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(input_ids=IDS, use_cache=False)
        failing.remove()
        unused = model(input_ids=IDS.flip(1), use_cache=False).logits
        assert all(map(torch.equal, gradients(model, bf16=True), expected))
        del unused
        first = recompute == "full"  # saves its input only, which needs no gradient and stays
        assert log.count("up begins") == 2 * (BLOCKS - 1 - first)
        log.clear()


def _fail(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_two_passes_before_the_first_backward_pass() -> None:
    model = llama()
    expected = gradients(model)
    ways = iter(("down", "up"))
    offload_activations(model, CPU, lambda _: OnlyBytes([], next(ways)))
    model.zero_grad()
    torch.manual_seed(1)
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (IDS, IDS.flip(0)[:, :12])]
    for loss in losses:
        loss.backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters() if p.grad is not None], expected))


def test_what_a_block_saves_leaves_after_the_next_and_comes_back_before_its_backward_pass() -> None:
    model = llama()
    log: list[str] = []
    ways = iter(("down", "up"))
    offload_activations(model, CPU, lambda _: LateCopies(log, next(ways)))
    for place, block in enumerate(blocks_of(model)):
        block.register_forward_pre_hook(lambda *_, place=place: log.append(f"forward {place}"))
        block.register_full_backward_pre_hook(lambda *_, place=place: log.append(f"backward {place}"))
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    forward = [["forward 0"], *(["down begins", f"forward {n}"] for n in range(1, BLOCKS))]
    backward = [[f"backward {n}", "up begins"] for n in range(BLOCKS - 1, 0, -1)]
    assert log == [*chain(*forward, *backward), "backward 0"]


def kept(model: LlamaForCausalLM) -> int:
    """Bytes that autograd keeps of all blocks but the last, in addition to weights and what the blocks share."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.randn(2, 20, 16, requires_grad=True)
    places = model.model.rotary_emb(hidden, torch.arange(20)[None])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in blocks_of(model)[:-1]:
            hidden = block(hidden, position_embeddings=places)
    stay = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *places)}
    return sum(size for address, size in found.items() if address not in stay)


def test_each_storage_leaves_once_and_weights_and_masks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "_HostMemory", Counted)
    model = llama()
    whole = kept(model)
    assert whole > 3 * 10 * IDS.numel() * 16 * 4
    offload_activations(model, CPU)
    Counted.sizes.clear()
    assert kept(model) == 0
    assert sum(Counted.sizes) == whole


def test_host_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    offload_activations(model, CPU)
    gradients(model)
    monkeypatch.setattr(torch, "empty", partial(_not_on_the_host, torch.empty))
    gradients(model)


def _not_on_the_host(empty: Callable[..., Tensor], *sizes: object, **options: object) -> Tensor:
    assert "pin_memory" not in options, "the buffers of the first step are free"
    return empty(*sizes, **options)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="no list of blocks"):
        offload_activations(nn.Linear(2, 2), CPU)


class Counted(_HostMemory):
    """Host memory that counts what it is asked for."""

    sizes: ClassVar[list[int]] = []

    def take(self, size: int) -> list[Tensor]:
        self.sizes.append(size)
        return super().take(size)


def count(least: int | None) -> int:
    """Begins to count copies of at least these bytes in a process of the pool, or ends; returns how many there were."""
    counted = len(Counted.sizes)
    Counted.sizes.clear()
    activation_offload.LEAST_BYTES = 1 << 20 if least is None else least
    activation_offload._HostMemory = _HostMemory if least is None else Counted  # type: ignore[misc]
    return counted


@pytest.mark.pool
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"data": 2},
        {"data": 2, "shard": "zero3", "recompute": "full"},
        {"data": 2, "shard": "zero1"},
        {"tensor": 2},
        {"context": 2},
    ],
    ids=str,
)
@pytest.mark.often("{'data': 2, 'shard': 'zero3', 'recompute': 'full'}")
def test_layouts_compute_what_one_process_does(layout: dict[str, object], pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("task: sft\nmodel: some/model\ndata: none.jsonl\nsteps: 5\n")
    config = AutoConfig.for_model("llama")
    twin = make_twin(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path, config=config)
    verifier = Verifier(twin, pool, whole=False)
    pool.run(count, 1, world=2)
    try:
        verdict = verifier.verdict(Cell("offload", {**layout, "offload": "activations"}))
    finally:
        counts = pool.run(count, None, world=2)
    assert verdict.passed, verdict.reason
    assert any(counts) and (all(counts) or not layout)


class Chain(nn.Module):
    """Blocks in a row."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def offloaded_by_a_module(layout: dict[str, Any]) -> int:
    """Copies in a pass of a module under a layout."""
    count(1)
    parts = spread_module(Chain(8), Mesh(Layout(data=2, **layout), CPU), compiled=False, compute=None)
    assert parts.root is not None
    parts.root(torch.randn(4, 8)).sum().backward()
    return count(None)


@pytest.mark.pool
def test_activations_of_modules_leave_under_layouts(pool: Pool) -> None:
    assert all(pool.run(offloaded_by_a_module, {"offload": "activations", "shard": "zero3"}, world=2))
    assert not any(pool.run(offloaded_by_a_module, {"shard": "zero3"}, world=2))


@pytest.mark.gpu
def test_copies_on_streams_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "PIECE_BYTES", 1 << 20)
    torch.manual_seed(0)
    model = Chain().cuda()
    own = copy.deepcopy(model)
    offload_activations(own, torch.device("cuda", torch.cuda.current_device()))
    for _ in range(3):
        x = torch.randn(4096, 512, device="cuda", requires_grad=True)
        peaks = []
        for each in (model, own):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            each(x).square().sum().backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        assert peaks[1] < peaks[0] / 2
        for one, other in zip(own.parameters(), model.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
