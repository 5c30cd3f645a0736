"""Gradient clipping with the norm that synchronisation has computed already."""

from __future__ import annotations

import math
from typing import Any

import torch


@torch.no_grad()
def clip_grad_norm_(sync: Any, max_norm: float, scaler: Any = None) -> torch.Tensor:
    """Scales the gradients in place so that their 2-norm is at most `max_norm`, and returns the norm they had.

    The norm is the one of the gradients as synchronised: no second read of them, the same bits on every rank. Changes to the
    gradients since (by hand, or by another backward pass without synchronisation) are not seen.

    Args:
        sync: what `gsync.register` returned, or a `SyncState`.
        max_norm: upper bound of the norm, above 0. With a scaler: of the unscaled gradients.
        scaler: the GradScaler, where one scales the loss: the norm is divided by its scale. Whether ``scaler.unscale_`` was
            called before or will be is the same, since clipping multiplies.

    Returns:
        [] fp64 tensor on the gradients' device: the norm before clipping, unscaled. Never a host synchronisation on CUDA.

    Raises:
        ValueError: max_norm is not a number above 0.
        GsyncError: no backward pass has been synchronised yet.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm > 0 or math.isnan(max_norm):
        raise ValueError(f"max_norm={max_norm!r}: expected a number above 0")
    norm = sync.grad_norm()
    if scaler is not None and scaler.is_enabled():
        norm = norm / _scale_of(scaler, norm.device)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = [parameter.grad for parameter in sync.parameters() if parameter.grad is not None]
    dense = [torch.view_as_real(g) if g.is_complex() else g for g in gradients if not g.is_sparse]
    for _, group in sorted(_by_dtype(dense).items(), key=lambda item: str(item[0])):
        torch._foreach_mul_(group, factor if group[0].dtype == torch.float64 else factor.float())
    for gradient in gradients:
        if gradient.is_sparse:
            gradient._values().mul_(factor.to(gradient.dtype))
    return norm


def _scale_of(scaler: Any, device: torch.device) -> torch.Tensor:
    scale = getattr(scaler, "_scale", None)  # the tensor: get_scale() would wait for the device
    if isinstance(scale, torch.Tensor):
        return scale.to(device=device, dtype=torch.float64)
    return torch.tensor(float(scaler.get_scale()), dtype=torch.float64, device=device)


def _by_dtype(tensors: list[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups
