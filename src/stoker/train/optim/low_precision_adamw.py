"""AdamW with low-precision moments: ``train.optimizer_states``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from stoker.grouping import grouped
from stoker.parallel.offload.host_optimizer import Groups
from stoker.parallel.shard_spec import local_shard
from stoker.train.optim.fused_adamw_step import fits, fused_step, step_numbers
from stoker.train.optim.held_moments import MOMENTS, HeldMoments, joined, split_like

# Elements whose moments are converted to the parameters' type at a time: what caches of a CPU hold, and few launches.
AT_ONCE, AT_ONCE_GPU = 1 << 20, 1 << 23


class Noise:
    """Random numbers of a step: a parameter's depend only on the step's number and on the parameter's size.

    Parameters of nearly one size share them, so that they are drawn once.
    """

    def __init__(self, step: int, device: torch.device) -> None:
        self._random = torch.Generator(device)
        self._step = step
        self._drawn: dict[int, Tensor] = {}

    def of(self, sizes: Sequence[int]) -> Tensor:
        """Returns 16 random bits for each element and moment of parameters of these sizes; int32, (2, elements)."""
        return joined([self._of(size) for size in sizes], dim=1)

    def _of(self, size: int) -> Tensor:
        count = 1 << (size - 1).bit_length()
        if count not in self._drawn:
            random = self._random.manual_seed(self._step)
            self._drawn[count] = torch.randint(
                1 << 16, (len(MOMENTS), count), generator=random, device=random.device, dtype=torch.int32
            )
        return self._drawn[count][:, :size]


@dataclass(frozen=True)
class _Piece:
    """Some rows of a parameter."""

    weights: Tensor
    gradient: Tensor
    held: dict[str, Tensor]


class LowPrecisionAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) that computes in the parameters' type and stores moments in another format.

    Random numbers depend on the step's number and the parameter's size, so that a resumed run, all replicas, and the
    copies of a parameter on processes that train other parameters beside it round alike. Like torch's fused AdamW, it
    changes nothing if its attribute ``found_inf`` is 1 on the device.
    """

    def __init__(
        self, groups: Groups, moments: HeldMoments, *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._moments = moments
        self._counted: list[Tensor] = []  # step counters that the last step raised; on the host

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the parameters; those without a gradient do not change."""
        noises: dict[tuple[int, torch.device], Noise] = {}
        self._counted = []
        for group in self.param_groups:
            alike: dict[tuple[int, torch.device, torch.dtype, tuple[str, ...]], list[_Piece]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self._state_of(parameter)
                    kind = int(state["step"]), parameter.device, parameter.dtype, tuple(state)
                    alike.setdefault(kind, []).extend(_pieces(parameter, state))
                    self._counted.append(state["step"])
            for (step, device, *_), pieces in alike.items():
                noise = noises.setdefault((step, device), Noise(step, device))
                fused = [piece for piece in pieces if fits(piece.weights, piece.held)]
                if fused:
                    self._step_fused(fused, step_numbers(group, step, device), noise)
                others = [piece for piece in pieces if not fits(piece.weights, piece.held)]
                for some in grouped(others, lambda piece: piece.weights.numel(), _at_once(device)):
                    self._step(some, group, step, noise)
        if self._counted:
            torch._foreach_add_(self._counted, 1)

    def count_back(self) -> None:
        """Resets the step counters after a step in which ``found_inf`` was 1."""
        if self._counted:
            torch._foreach_sub_(self._counted, 1)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in MOMENTS:
                state |= self._moments.zeros(name, parameter)
        return state

    def _step_fused(self, pieces: list[_Piece], numbers: Tensor, noise: Noise) -> None:
        bad = getattr(self, "found_inf", None)
        for piece in pieces:
            bits = self._bits(noise, [piece])
            fused_step(self._moments, piece.weights, piece.gradient, piece.held, numbers, bits, bad)

    def _bits(self, noise: Noise, pieces: list[_Piece]) -> Sequence[Tensor] | None:
        if not self._moments.rounds_at_random:
            return None
        return noise.of([piece.weights.numel() for piece in pieces]).unbind()

    def _step(self, pieces: list[_Piece], group: dict[str, Any], step: int, noise: Noise) -> None:
        weights = [piece.weights.contiguous() for piece in pieces]  # the fused step needs the order of the moments
        held, bad = [piece.held for piece in pieces], getattr(self, "found_inf", None)
        dtype = weights[0].dtype
        codebooks = self._moments.codebooks(weights[0].device, dtype)
        exact = {name: self._moments.read(name, held, dtype, codebooks) for name in MOMENTS}
        first, second = (split_like(weights, exact[name]) for name in MOMENTS)
        counters = torch.full((len(pieces),), float(step), device=weights[0].device)
        adamw(
            weights,
            [piece.gradient.contiguous() for piece in pieces],
            first,
            second,
            [],
            list(counters.unbind()),  # adamw increments them
            fused=True,
            found_inf=bad,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for piece, stepped in zip(pieces, weights, strict=True):
            if not piece.weights.is_contiguous():
                piece.weights.copy_(stepped)
        self._moments.write(held, exact, self._bits(noise, pieces), bad, codebooks)


def _at_once(device: torch.device) -> int:
    return AT_ONCE if device.type == "cpu" else AT_ONCE_GPU


def _pieces(parameter: Tensor, state: Mapping[str, Any]) -> Iterator[_Piece]:
    """Yields this process' rows of a parameter, some at a time."""
    assert parameter.grad is not None
    weights = local_shard(parameter)
    rows = max(1, _at_once(weights.device) * weights.shape[0] // max(1, weights.numel())) if weights.dim() else 1
    names = [name for name in state if name != "step"]
    tensors = (weights, local_shard(parameter.grad), *(local_shard(state[name]) for name in names))
    for own, gradient, *held in zip(*(torch.atleast_1d(x).split(rows) for x in tensors), strict=True):
        if own.numel():
            yield _Piece(own, gradient, dict(zip(names, held, strict=True)))
