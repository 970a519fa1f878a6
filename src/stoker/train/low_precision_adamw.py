"""AdamW with low-precision moments: ``train.optimizer_states``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from stoker.grouping import grouped
from stoker.parallel.host_optimizer import Groups
from stoker.parallel.local_shard import local_shard

MOMENTS = ("exp_avg", "exp_avg_sq")
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


class HeldMoments(Protocol):
    """Storage format of the moments.

    A stored moment is one or more named tensors, which are split along the first dimension like the parameter.
    """

    def zeros(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Returns a stored moment of zeros.

        Args:
            parameter: possibly sharded; the tensors of the moment have its placement.
        """

    def read(self, name: str, held: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> Tensor:
        """Returns a moment of several parameters in ``dtype``, one after the other; one-dimensional."""

    def write(
        self, held: Sequence[Mapping[str, Tensor]], exact: Mapping[str, Tensor], noise: Noise, bad: Tensor | None
    ) -> None:
        """Stores new values of both moments in ``held``, and may overwrite ``exact``.

        Args:
            exact: moments by name, as `read` returns them.
            bad: 1 where the moments did not change, and ``held`` must not either; 0-d.
        """


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
                for some in grouped(pieces, lambda piece: piece.weights.numel(), _at_once(device)):
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

    def _step(self, pieces: list[_Piece], group: dict[str, Any], step: int, noise: Noise) -> None:
        weights = [piece.weights.contiguous() for piece in pieces]  # the fused step needs the order of the moments
        held, bad = [piece.held for piece in pieces], getattr(self, "found_inf", None)
        exact = {name: self._moments.read(name, held, weights[0].dtype) for name in MOMENTS}
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
        self._moments.write(held, exact, noise, bad)


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


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenates tensors; a single one is returned without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def split_like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Returns views of a one-dimensional tensor in the shapes of others."""
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def store(places: Sequence[Tensor], flat: Tensor) -> None:
    """Copies a one-dimensional tensor into several, one after the other."""
    flat = flat if len(places) == 1 else flat.contiguous()  # then one launch copies all of them
    torch._foreach_copy_(list(places), split_like(places, flat))
