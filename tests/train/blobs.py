"""A tiny classification for ``task: module``, with what makes a resume hard: batch norm, dropout, noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

SAMPLES = 50


class Noisy(Dataset):
    """Samples that are augmented at random, from torch's generator and from numpy's."""

    def __init__(self) -> None:
        self.inputs, self.labels = _blobs(0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(6) + 0.1 * torch.from_numpy(np.random.randn(6)).float()
        return self.inputs[index] + noise, self.labels[index]


def _blobs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(SAMPLES) % 3
    return torch.randn(SAMPLES, 6, generator=generator) + labels[:, None], labels


def network(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 3))


def half_frozen() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)
    return model


def frozen_norm() -> nn.Module:
    norm = nn.BatchNorm1d(8).eval()
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 3)).double()


def plain_network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def losses_apart(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def noisy() -> Dataset:
    return Noisy()


def plain() -> TensorDataset:
    return TensorDataset(*_blobs(0))


def held_out() -> TensorDataset:
    return TensorDataset(*_blobs(1))


def doubles() -> TensorDataset:
    inputs, labels = _blobs(0)
    return TensorDataset(inputs.double(), labels)


def no_network() -> str:
    return "a network"


constant = 3


def no_data() -> Dataset:
    raise ValueError("the disk is empty")
