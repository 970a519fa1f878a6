"""Optimizers of rows: each row is updated by its own gradients alone, in the steps in which it was looked up.

An optimizer's state is one matrix [rows, columns] in addition to the values. A row that is not looked up in a step
keeps values and state, as in `torch.optim.SparseAdam`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.sparse.table_settings import TableSettings


@dataclass(frozen=True)
class RowOptimizer:
    """An update rule.

    Attributes:
        columns: numbers of state a row, from the table's width.
        first: state [n, columns] of new rows, from their values [n, width].
        step: updates values [n, width] and state [n, columns] in place, from the gradients [n, width] and the learning
            rate, which a schedule may have changed.
    """

    columns: Callable[[int], int]
    first: Callable[[Tensor, TableSettings], Tensor]
    step: Callable[[Tensor, Tensor, Tensor, TableSettings, float], None]


def _filled(columns: Callable[[int], int]) -> Callable[[Tensor, TableSettings], Tensor]:
    def first(values: Tensor, settings: TableSettings) -> Tensor:
        return values.new_full((len(values), columns(values.shape[1])), settings.initial)

    return first


def _sgd(values: Tensor, state: Tensor, grads: Tensor, settings: TableSettings, lr: float) -> None:
    values.add_(grads, alpha=-lr)


def _rowwise_adagrad(values: Tensor, state: Tensor, grads: Tensor, settings: TableSettings, lr: float) -> None:
    """Row-wise Adagrad: one accumulator per row, of the mean square of its gradients (FBGEMM's exact version)."""
    state.add_((grads * grads).mean(1, keepdim=True))
    values.sub_(grads * (lr / (state.sqrt() + settings.eps)))


def _adagrad(values: Tensor, state: Tensor, grads: Tensor, settings: TableSettings, lr: float) -> None:
    """Duchi et al., 2011, as `torch.optim.Adagrad` has it."""
    state.addcmul_(grads, grads)
    values.addcdiv_(grads, state.sqrt().add_(settings.eps), value=-lr)


def _adam(values: Tensor, state: Tensor, grads: Tensor, settings: TableSettings, lr: float) -> None:
    """Kingma and Ba, 2015. The bias is corrected by the number of the row's own updates: the state's last column."""
    width = values.shape[1]
    (beta1, beta2), mean, square, updates = settings.betas, state[:, :width], state[:, width:-1], state[:, -1:]
    updates.add_(1)
    mean.lerp_(grads, 1 - beta1)
    square.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    root = (square / (1 - beta2**updates)).sqrt_().add_(settings.eps)
    values.sub_(mean / root * (lr / (1 - beta1**updates)))


def _no_state(values: Tensor, settings: TableSettings) -> Tensor:
    return values.new_empty(len(values), 0)


def _adam_first(values: Tensor, settings: TableSettings) -> Tensor:
    return values.new_zeros(len(values), 2 * values.shape[1] + 1)


def _ftrl(values: Tensor, state: Tensor, grads: Tensor, settings: TableSettings, lr: float) -> None:
    """FTRL-Proximal (McMahan et al., 2013, algorithm 1), with the table's rate as alpha.

    The present rate ``lr`` is ignored: weights are a closed form of all gradients so far and of alpha, so an alpha that
    falls to 0 would bring every row to 0. FTRL's own rate falls with the square root of the summed squares.
    """
    width = values.shape[1]
    z, n = state[:, :width], state[:, width:]
    before = n.sqrt()
    n.addcmul_(grads, grads)
    root = n.sqrt()
    z.add_(grads).sub_((root - before) / settings.lr * values)
    shrunk = z - z.clamp(-settings.l1, settings.l1)
    values.copy_(-shrunk / ((settings.ftrl_beta + root) / settings.lr + settings.l2))


def _ftrl_first(values: Tensor, settings: TableSettings) -> Tensor:
    """Returns the initial z, whose weights are the initial values, and n."""
    n = torch.full_like(values, settings.initial)
    scale = (settings.ftrl_beta + n.sqrt()) / settings.lr + settings.l2
    return torch.cat([-values * scale - values.sign() * settings.l1, n], dim=1)


OPTIMIZERS = {
    "sgd": RowOptimizer(lambda width: 0, _no_state, _sgd),
    "rowwise_adagrad": RowOptimizer(lambda width: 1, _filled(lambda width: 1), _rowwise_adagrad),
    "adagrad": RowOptimizer(lambda width: width, _filled(lambda width: width), _adagrad),
    "adam": RowOptimizer(lambda width: 2 * width + 1, _adam_first, _adam),
    "ftrl": RowOptimizer(lambda width: 2 * width, _ftrl_first, _ftrl),
}
