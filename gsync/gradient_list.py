"""Gradients where autograd left them: their order in memory, and NaN for those that were not synchronised."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .operators import is_dense
from .reference import memory_order


def dense_like(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns `gradient`, or a copy of it, with its elements in memory as those of a payload.

    That is the parameter's own order in memory if it is dense, else the logical one.
    """
    if not gradient.is_conj() and not gradient.is_neg():
        if not is_dense(param) and gradient.is_contiguous():
            return gradient
        dims = [dim for dim, size in enumerate(param.shape) if size > 1]
        if is_dense(param) and all(gradient.stride(dim) == param.stride(dim) for dim in dims):
            return gradient
    return empty_gradient(param).copy_(gradient)


def empty_gradient(param: torch.Tensor) -> torch.Tensor:
    """Returns memory for a gradient of `param`, in its order of elements."""
    if not is_dense(param):
        return torch.empty(param.shape, dtype=param.dtype, device=param.device)
    return torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device)


def flat(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a flat view of a dense gradient in the order in which its elements lie; a complex one is two real ones."""
    return memory_order(torch.view_as_real(gradient) if gradient.is_complex() else gradient)


def fill_nan_gradients(params: Sequence[torch.Tensor]) -> None:
    """Fills the gradients of `params` with NaN, so that nobody trains on gradients that are not the mean."""
    for param in params:
        if param.grad is not None and param.requires_grad:
            if param.grad.is_sparse and param.grad._nnz() == 0:
                param.grad = torch.full_like(param.grad, float("nan"), layout=torch.strided).to_sparse()
            fill_nan(param.grad)


def fill_nan(tensor: torch.Tensor) -> None:
    """Fills a tensor, or the values that a sparse one stores, with NaN."""
    with torch.no_grad():
        tensor = tensor._values() if tensor.is_sparse else tensor.detach()
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor).fill_(float("nan"))
