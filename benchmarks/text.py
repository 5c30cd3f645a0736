"""Text to learn from without a download: the help topics that ship with Python, and a small transformer over its characters."""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from .workloads import Workload

NAME = "text"
BATCH, LENGTH = 8, 32
WIDTH, HEADS, LAYERS = 32, 4, 1
_ALPHABET = "\n " + "".join(map(chr, range(33, 127)))
_OTHER = len(_ALPHABET)  # one token for all other characters
_HELD_BACK = 64  # every 64th stretch of 1024 characters is kept for the evaluation
_STRETCH = 1024


@functools.cache
def _text() -> str:
    from pydoc_data import topics  # type: ignore[import-untyped]

    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def description() -> dict[str, str | int]:
    """Return what the text is: it differs between versions of Python."""
    return {"source": "pydoc_data.topics", "characters": len(_text()), "sha256": hashlib.sha256(_text().encode()).hexdigest()}


@functools.cache
def _tokens() -> tuple[Tensor, Tensor]:
    """To train on, and kept back."""
    places = {character: idx for idx, character in enumerate(_ALPHABET)}
    tokens = torch.tensor([places.get(character, _OTHER) for character in _text()])
    stretches = tokens[: len(tokens) // _STRETCH * _STRETCH].view(-1, _STRETCH)
    kept = torch.arange(len(stretches)) % _HELD_BACK == 0
    return stretches[~kept].flatten(), stretches[kept].flatten()


class _Block(nn.Module):
    """Attention that looks back only, then two linear layers; each on normalised input and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_layers = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention_in, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.attention_in(self.before_attention(hidden)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.layers(self.before_layers(hidden))


class CharacterTransformer(nn.Module):
    """Predicts each next character of [batch, LENGTH] tokens: [batch * LENGTH, tokens]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_OTHER + 1, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, _OTHER + 1)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        return self.head(self.norm(self.blocks(hidden))).flatten(0, 1)


def make_text_workload(seed: int) -> Workload:
    """Return the workload; `seed` fixes which parts of the text a step sees."""
    train, held_back = _tokens()

    def batch_at(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(train) - LENGTH, (world_size, BATCH), generator=generator)[rank]
        rows = train[starts[:, None] + torch.arange(LENGTH + 1)]
        return rows[:, :-1], rows[:, 1:].flatten()

    def evaluate(module: nn.Module, device: torch.device) -> tuple[float, float]:
        rows = held_back[: len(held_back) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1).to(device)
        with torch.no_grad():
            outputs, wanted = module(rows[:, :-1]), rows[:, 1:].flatten()
            right = (outputs.argmax(1) == wanted).float().mean()
            return functional.cross_entropy(outputs, wanted).item(), 100.0 * right.item()

    return Workload(NAME, BATCH, 3e-3, 0.0, CharacterTransformer, batch_at, functional.cross_entropy, evaluate)
