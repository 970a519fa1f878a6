"""Steps on tensors that state a CUDA device and hold no numbers: nothing on the host is mixed in, and nothing is read.

Such tensors (`FakeTensorMode`) need no GPU. They raise where an operation has tensors of two devices, and where the
host asks for a number, for which it would wait. Autograd needs a GPU, so functions are called without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from stoker.generate.request import Generation, Request, Sampling, Token
from stoker.generate.sampling import next_tokens
from stoker.hardware.process_device import Device
from stoker.job.blocks.train_block import TrainBlock
from stoker.models.attention import packed_attention, varlen_index
from stoker.models.attention.packed_row import row_of
from stoker.models.chunked_head import LogitForm
from stoker.models.head import head_of
from stoker.models.head_functions import CrossEntropy, Scores
from stoker.models.language_model import LanguageModel
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.lora import _FusedLora, fuse_lora
from stoker.train.optim import fused_adamw_step, low_precision_adamw
from stoker.train.optim.eight_bit_states import codebook, codebook_for
from stoker.train.optim.optimizer import build_optimizer
from stoker.train.single_process import SingleProcess

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


SAME = {Tensor.copy_: aten.copy_, Tensor.contiguous: aten.contiguous}


class WithoutGuard(TorchFunctionMode):
    """Copies and indexes without setting the current device, for which a build of torch for CPUs has no code."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in SAME:
            return SAME[function](*args, **(kwargs or {}))
        if function is torch._foreach_copy_:
            return [aten.copy_(*pair) for pair in zip(*args, strict=True)]
        if function is Tensor.__getitem__:
            return indexed(*args)
        if function is Tensor.__setitem__:
            x, index, value = args
            return aten.copy_(indexed(x, index), value)
        return function(*args, **(kwargs or {}))


def indexed(x: Tensor, index: Any) -> Tensor:
    """``x[index]`` of slices, numbers, None and an ellipsis, or of one tensor."""
    if isinstance(index, Tensor):
        return aten.index(x, [index])
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (x.dim() - sum(part is not None for part in parts) + 1)
    dim = 0
    for part in parts:
        if part is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(part, slice):
            x = aten.slice(x, dim, part.start, part.stop, part.step or 1)
        else:
            x = aten.select(x, dim, part)
            dim -= 1
        dim += 1
    return x


class ZeroNoise(low_precision_adamw.Noise):
    """Random numbers without CUDA's generator."""

    def __init__(self, step: int, device: torch.device) -> None:
        self._device = device

    def _of(self, size: int) -> Tensor:
        return torch.zeros(2, size, dtype=torch.int32, device=self._device)


def on_host(counter: Tensor) -> int:
    """Reads a step counter, which costs no wait on the host."""
    assert counter.device.type == "cpu"
    return 3


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(low_precision_adamw, "int", on_host, raising=False)
    monkeypatch.setattr(low_precision_adamw, "Noise", ZeroNoise)
    forget_codebooks()
    with torch.no_grad(), FakeTensorMode(), WithoutGuard():
        yield
    forget_codebooks()


def forget_codebooks() -> None:
    for each in (codebook, codebook_for):
        each.cache_clear()


def test_numbers_and_other_devices_are_noticed() -> None:
    on_gpu = torch.ones(2, device=CUDA)
    with pytest.raises(DataDependentOutputException):
        bool(on_gpu.sum() > 0)
    with pytest.raises(RuntimeError, match="device"):
        torch.cat([on_gpu, torch.ones(2)])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = [(64, 128), (128, 64), (64, 128), (64,), (40,)]
        self.blocks = nn.ModuleList([nn.Module()])
        for number, shape in enumerate(shapes):
            weight = nn.Parameter(torch.empty(shape, device=CUDA))
            weight.grad = torch.empty_like(weight)
            self.blocks[0].register_parameter(f"w{number}", weight)


@pytest.mark.parametrize("limit", [0.0, 1.0])
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("keys", [
    {"optimizer": "adamw"}, {"optimizer": "adamw", "optimizer_states": "bf16"},
    {"optimizer": "adamw", "optimizer_states": "8bit"}, {"optimizer": "muon"}, {"optimizer": "sgd"},
], ids=str)  # fmt: skip
def test_a_step(keys: dict[str, Any], guarded: bool, limit: float) -> None:
    model = Blocks()
    train: Any = TrainBlock(lr=1e-3, beta2=0.95, eps=1e-8, weight_decay=0.1, **keys)
    optimizer = build_optimizer(model, train)
    norm = SingleProcess(SimpleNamespace(), Device("cuda", "bf16", "", 0), list(model.parameters())).clip(limit)
    assert norm.device == CUDA
    if guarded and keys["optimizer"] != "sgd":  # which has no such argument
        optimizer.grad_scale, optimizer.found_inf = None, norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
    optimizer.step()
    assert {parameter.device for parameter in model.parameters()} == {CUDA}


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_the_operators_of_a_compiled_step(states: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_adamw_step, "LEAST", 1)
    monkeypatch.setattr(fused_adamw_step, "compiles_steps", lambda kind: kind == "cuda")
    monkeypatch.setattr(fused_adamw_step, "_compiled", lambda: fused_adamw_step.step_of_rows)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    model = Blocks()
    train: Any = TrainBlock(lr=1e-3, beta2=0.95, eps=1e-8, weight_decay=0.1, optimizer_states=states)
    optimizer = build_optimizer(model, train)
    optimizer.found_inf = torch.zeros((), device=CUDA)  # type: ignore[attr-defined]
    optimizer.step()
    with Waits() as waits:
        optimizer.step()
    assert not waits.found


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("wide", [False, True])
def test_the_head(softcap: float | None, wide: bool) -> None:
    hidden = torch.empty(40, 16, dtype=torch.float32 if wide else torch.bfloat16, device=CUDA)
    weight, bias = torch.empty(50, 16, device=CUDA), torch.empty(50, device=CUDA)
    targets = torch.empty(40, dtype=torch.int64, device=CUDA)
    for function, how in ((CrossEntropy, (True,)), (Scores, (True, True, True)), (Scores, (True, False, True))):
        trained = wide  # products of 16 bits that are summed in 32 exist for CUDA only
        context = Context(needs_input_grad=(True, trained, trained))
        results = function.forward(context, hidden, weight, bias, targets, LogitForm(0.5, softcap, None), *how)
        gradients = function.backward(context, *(torch.empty_like(x, dtype=torch.float32) for x in results))
        assert gradients[0].shape == hidden.shape
        for gradient, of in zip(gradients[1:3], (weight, bias), strict=True):
            assert gradient.shape == of.shape if trained else gradient is None


def test_lora() -> None:
    x, base = torch.empty(8, 16, device=CUDA), torch.empty(24, 16, device=CUDA)
    a, b = torch.empty(4, 16, device=CUDA), torch.empty(24, 4, device=CUDA)
    for weight in (base, lambda: base):
        context = Context(needs_input_grad=(True,) * 6)
        y = _FusedLora.forward.__wrapped__(context, x, weight, None, a, b, 2.0)
        gradients = _FusedLora.backward.__wrapped__(context, torch.empty_like(y))
        assert [g.shape for g in (gradients[0], *gradients[3:5])] == [t.shape for t in (x, a, b)]


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_a_pass_over_a_packed_row(tune: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_index, "_has_flash", lambda _: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )
        training_form(model)
        if tune == "lora":
            fuse_lora(get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")))
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    dtype = torch.bfloat16 if isinstance(tensor, nn.Parameter) else tensor.dtype
                    on_gpu = torch.empty(tensor.shape, dtype=dtype, device=CUDA)
                    tensors[name] = nn.Parameter(on_gpu) if isinstance(tensor, nn.Parameter) else on_gpu
    packed_attention.register()
    model.set_attn_implementation(packed_attention.NAME)
    language = LanguageModel(model.train(), head_of(model), packs=True)
    rows = [(np.arange(n, dtype=np.uint32), np.arange(n) % 3 > 0) for n in (24, 9, 31)]
    (inputs,) = language.lay_out(rows, CUDA)
    with row_of(inputs):
        loss = language.loss(inputs)[0]
    assert loss.device == CUDA
    assert inputs.targets.device == CUDA


class Waits(TorchDispatchMode):
    """Records copies to a GPU for which the host waits, since they are not from page-locked memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is aten._to_copy.default and kwargs.get("device") == CUDA and not kwargs.get("non_blocking"):
            self.found.append(args[0])
        return function(*args, **kwargs)


@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (0.7, 1.0), (0.0, 0.7)], ids=str)
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("penalised", [False, True])
def test_sampling_waits_for_its_tokens_only(
    temperatures: tuple[float, ...], top_p: float, penalised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its kernels are launched while those of the step still run. With top-p it first waits for the number of
    tokens that it requires.
    """
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    penalties: Any = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "bias": ((4, 1.0),)} if penalised else {}
    least = {"stop_ids": frozenset((2, 3)), "min_tokens": 5} if penalised else {}
    requests = (Request((1,), 10, Sampling(temperature=t, top_p=top_p, **penalties), **least) for t in temperatures)
    asked = [Generation(request, tokens=[Token(7, 0.0)]) for request in requests]
    logits = torch.empty(2, 50, device=CUDA)
    with Waits() as waits, pytest.raises(DataDependentOutputException):  # where it reads the tokens
        next_tokens(logits, asked)
    assert not waits.found


class Context(SimpleNamespace):
    """What an autograd function keeps between its passes."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: Tensor) -> None:
        pass

    def set_materialize_grads(self, _: bool) -> None:
        pass
