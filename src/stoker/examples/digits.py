"""Handwritten digits: a small convolutional network on the 1,797 images of 8 x 8 of scikit-learn.

Shapes: B batch; an image is (1, 8, 8).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stoker.errors import UserError

CLASSES = 10
BRIGHTEST = 16.0  # of a pixel
HELD_OUT = 0.2


def network(width: int = 16) -> nn.Module:
    """Two convolutions and a linear layer: (B, 1, 8, 8) to (B, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(2 * width * 4, CLASSES),  # two poolings leave 2 x 2 pixels
    )


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of the samples."""
    return nn.functional.cross_entropy(outputs, targets)


def train_data() -> TensorDataset:
    """Four fifths of the images."""
    return _data()[0]


def test_data() -> TensorDataset:
    """The other fifth."""
    return _data()[1]


def _data() -> tuple[TensorDataset, TensorDataset]:
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise UserError("the digits come with scikit-learn, which is missing; pip install scikit-learn") from error
    digits = load_digits()
    images = torch.tensor(digits.images / BRIGHTEST, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=HELD_OUT, random_state=0, stratify=labels)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])
