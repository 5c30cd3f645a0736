"""What the examples train on: the handwritten digits that come with scikit-learn, and a small classifier."""

from __future__ import annotations

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def load() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """Images [samples, 64] from 0 to 1 and labels [samples]: 1437 to train on, and 360 held out."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    return TensorDataset(images[:-360], labels[:-360]), (images[-360:], labels[-360:])


def classifier() -> nn.Sequential:
    """Two layers, 19,210 parameters, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


@torch.no_grad()
def accuracy(model: nn.Module, held_out: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The share of the images held out that `model` classifies rightly."""
    device = next(model.parameters()).device
    images, labels = (tensor.to(device) for tensor in held_out)
    return (model(images).argmax(1) == labels).float().mean().item()
