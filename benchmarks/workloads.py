"""What is trained: handwritten digits (real data, no download), and a transformer and an MLP of any size (made-up data).

    digits-cnn, digits-mlp   scikit-learn's 1797 images of 8x8 pixels: 1437 to train on, 360 kept for the accuracy
    transformer              next-token prediction over tokens that follow a fixed random rule
    mlp                      `layers` linear layers of `width` x `width`, regression to the output of a fixed random map
    many                     `layers` parameters of `width` elements, regression: as much bookkeeping and as little else as can be

Every rank draws its own part of the same global batch, by seed and step alone, so that all rivals see the same data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

MODELS = ("digits-cnn", "digits-mlp", "transformer", "mlp", "many")
_NUM_TRAIN_DIGITS = 1437


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and the batch; None stands for the model's own default.

    Attributes:
        layers: linear layers (mlp, digits-mlp), encoder layers (transformer).
        width: features of a layer.
        batch: samples per rank and step.
        sequence: tokens per sample (transformer).
        heads: attention heads (transformer).
        vocabulary: distinct tokens (transformer).
    """

    layers: int | None = None
    width: int | None = None
    batch: int | None = None
    sequence: int | None = None
    heads: int | None = None
    vocabulary: int | None = None


@dataclass(frozen=True)
class Workload:
    """A model, its data and its loss.

    Attributes:
        name: one of MODELS.
        batch: samples per rank and step.
        learning_rate: step of SGD.
        momentum: momentum of SGD.
        build: () -> module on the CPU; weights follow torch's global seed.
        batch_at: (step, rank, world_size) -> inputs and targets on the CPU.
        loss: (outputs, targets) -> scalar.
        evaluate: (module, device) -> (loss, accuracy in percent) on data kept back, or None where there is no such data.
    """

    name: str
    batch: int
    learning_rate: float
    momentum: float
    build: Callable[[], nn.Module]
    batch_at: Callable[[int, int, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    evaluate: Callable[[nn.Module, torch.device], tuple[float, float]] | None = None


_DEFAULTS = {
    "digits-cnn": Sizes(width=32, batch=32),
    "digits-mlp": Sizes(layers=3, width=256, batch=32),
    "transformer": Sizes(layers=4, width=256, batch=8, sequence=64, heads=4, vocabulary=1000),
    "mlp": Sizes(layers=6, width=2048, batch=8),
    "many": Sizes(layers=1000, width=1024, batch=1),
}


def full_sizes(model: str, sizes: Sizes) -> Sizes:
    """Return `sizes` with the defaults of `model` filled in.

    Raises:
        ValueError: the model is unknown, a size is not positive, or a size is given that this model does not have.
    """
    if model not in _DEFAULTS:
        raise ValueError(f"--model {model}: expected one of {', '.join(MODELS)}")
    defaults = vars(_DEFAULTS[model])
    full = {}
    for name, value in vars(sizes).items():
        if value is not None and defaults[name] is None:
            raise ValueError(f"--{name} {value}: {model} has no such size")
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: expected at least 1")
        full[name] = defaults[name] if value is None else value
    if full["heads"] and full["width"] % full["heads"]:
        raise ValueError(f"--width {full['width']}: not a multiple of --heads {full['heads']}")
    return Sizes(**full)


def make_workload(model: str, sizes: Sizes, seed: int) -> Workload:
    """Return the workload `model`; `seed` fixes its data.

    Raises:
        ValueError: see `full_sizes`.
        ModuleNotFoundError: scikit-learn is missing (digits only); the message says how to install it.
    """
    full = full_sizes(model, sizes)
    makers = {"digits-cnn": _digits, "digits-mlp": _digits, "transformer": _transformer, "mlp": _mlp, "many": _many}
    return makers[model](model, full, seed)


def _digits(model: str, sizes: Sizes, seed: int) -> Workload:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--model {model} trains on scikit-learn's digits: pip install scikit-learn, or take --model mlp"
        ) from error
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))  # the split is always the same
    images = (torch.from_numpy(digits.images).float()[order] - 8.0) / 8.0  # pixels are 0 to 16
    labels = torch.from_numpy(digits.target).long()[order]
    images = images.unsqueeze(1)
    train, test = slice(0, _NUM_TRAIN_DIGITS), slice(_NUM_TRAIN_DIGITS, None)
    batch, width, layers = _given(sizes.batch), _given(sizes.width), sizes.layers

    def build() -> nn.Module:
        return _digits_cnn(width) if model == "digits-cnn" else _digits_mlp(_given(layers), width)

    def batch_at(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(_NUM_TRAIN_DIGITS, (world_size, batch), generator=_generator(seed, step))[rank]
        return images[train][chosen], labels[train][chosen]

    def evaluate(module: nn.Module, device: torch.device) -> tuple[float, float]:
        with torch.no_grad():
            outputs, wanted = module(images[test].to(device)), labels[test].to(device)
            right = (outputs.argmax(1) == wanted).float().mean()
            return functional.cross_entropy(outputs, wanted).item(), 100.0 * right.item()

    return Workload(model, batch, 0.05, 0.9, build, batch_at, functional.cross_entropy, evaluate)


def _digits_cnn(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, 10),
    )


def _digits_mlp(layers: int, width: int) -> nn.Module:
    features = [64] + [width] * (layers - 1) + [10]
    stack: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(features):
        stack += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*stack[:-1])


def _mlp(model: str, sizes: Sizes, seed: int) -> Workload:
    layers, width, batch = _given(sizes.layers), _given(sizes.width), _given(sizes.batch)
    rule = torch.randn(width, generator=torch.Generator().manual_seed(seed))

    def build() -> nn.Module:
        stack: list[nn.Module] = []
        for _ in range(layers):
            stack += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*stack[:-1])

    def batch_at(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(world_size, batch, width, generator=_generator(seed, step))[rank]
        return inputs, inputs * rule

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        # Summed over features, so that gradients stay in fp16's normal range: their mean would be a range test, not a speed test.
        return functional.mse_loss(outputs, targets, reduction="sum") / batch

    return Workload(model, batch, 1e-4, 0.0, build, batch_at, loss)


class _Many(nn.Module):
    """Adds up parameters, each times the input."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(0.01 * torch.randn(numel)) for _ in range(count)])

    def forward(self, inputs: Tensor) -> Tensor:
        total = torch.zeros_like(inputs)
        for part in self.parts:
            total = torch.addcmul(total, part, inputs)
        return total


def _many(model: str, sizes: Sizes, seed: int) -> Workload:
    count, numel, batch = _given(sizes.layers), _given(sizes.width), _given(sizes.batch)
    rule = torch.randn(numel, generator=torch.Generator().manual_seed(seed))

    def batch_at(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(world_size, batch, numel, generator=_generator(seed, step))[rank]
        return inputs, inputs * rule

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets, reduction="sum") / batch

    return Workload(model, batch, 1e-5, 0.0, lambda: _Many(count, numel), batch_at, loss)


class _Transformer(nn.Module):
    """Token and position embeddings, encoder layers that look back only, and a linear map to the vocabulary."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, length = _given(sizes.width), _given(sizes.sequence)
        self.tokens = nn.Embedding(_given(sizes.vocabulary), width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, _given(sizes.heads), 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, _given(sizes.layers), enable_nested_tensor=False)
        self.head = nn.Linear(width, _given(sizes.vocabulary))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers(self.tokens(inputs) + self.positions, mask=self.mask, is_causal=True)
        return self.head(hidden).flatten(0, 1)


def _transformer(model: str, sizes: Sizes, seed: int) -> Workload:
    batch, length, vocabulary = _given(sizes.batch), _given(sizes.sequence), _given(sizes.vocabulary)
    follows = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))

    def batch_at(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        tokens = [torch.randint(vocabulary, (world_size, batch), generator=_generator(seed, step))[rank]]
        for _ in range(length):
            tokens.append(follows[tokens[-1]])
        text = torch.stack(tokens, dim=1)
        return text[:, :-1], text[:, 1:].flatten()

    return Workload(model, batch, 0.01, 0.0, lambda: _Transformer(sizes), batch_at, functional.cross_entropy)


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def _given(size: int | None) -> int:
    assert size is not None  # full_sizes has filled it in
    return size
