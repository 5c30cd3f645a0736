"""What `GradReducer` has to see of a module's forward pass: parameters that were replaced, the begin of an outer backward pass.

Both come as hooks on the module, which also keep the reducer alive as long as the module is. A copy of the module has hooks that
do nothing, and is not synchronised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from .errors import GsyncError
from .model import strip_wrappers


class ModuleWatch:
    """Tells when a module has other parameters than at the start. Costs about 0.3 µs for each submodule.

    Args:
        synchronised: ids of the parameters that are synchronised. The others were frozen, and are to stay so.
    """

    def __init__(self, module: nn.Module, synchronised: set[int]) -> None:
        self._module = weakref.ref(module)
        named = named_parameters(module)
        ignored = {id(param) for name, param in module.named_parameters() if name in _ignored(module)}
        self._known = {id(param): name for name, param in named.items()}
        others = {name: param for name, param in named.items() if id(param) not in synchronised | ignored}
        self._others = {name: weakref.ref(param) for name, param in others.items() if param.is_floating_point()}
        self._tables = _tables(module)

    def module(self) -> nn.Module | None:
        """The module, while it exists."""
        return self._module()

    def check(self) -> None:
        """Looks whether parameters were replaced or added since the start.

        Raises:
            GsyncError: names the first one: its gradients would stay this rank's own.
        """
        for name, other in self._others.items():
            param = other()
            if param is not None and param.requires_grad:
                raise GsyncError(
                    f"parameter {name!r} is trained now, but had another device or dtype than those which were when the "
                    "GradReducer was made, so its gradients would not be synchronised"
                )
        if all([*map(id, table.values())] == ids for table, ids in self._tables):
            return
        module = self._module()
        if module is None:
            return
        for name, param in named_parameters(module).items():
            if id(param) not in self._known and param.requires_grad:
                verb = "replaced" if name in self._known.values() else "added"
                raise GsyncError(
                    f"parameter {name!r} was {verb} after the GradReducer was made, so its gradients would not be synchronised; "
                    "close() the reducer and make a new one, on every rank"
                )
        self._tables = _tables(module)  # a module without parameters was exchanged, or a parameter taken away


class ForwardHooks:
    """The hooks on the module: `before` its forward pass, and at the first gradient that reaches its outputs `in_backward`.

    Args:
        owner: kept alive by the hooks.
        before: called with the module. Not in compiled code, which has no breaks for it, unless `always`.
        in_backward: called in the backward pass, in the outermost one where reentrant checkpointing nests them.
    """

    def __init__(
        self,
        module: nn.Module,
        owner: Any,
        before: Callable[[nn.Module], None],
        in_backward: Callable[[], None],
        always: bool,
    ) -> None:
        first: _Hook = _BreakingHook(owner, torch.compiler.disable(before)) if always else _Hook(owner, before)
        self._handles = [
            module.register_forward_pre_hook(first),
            module.register_forward_hook(_OutputHook(owner, in_backward)),
        ]

    def remove(self) -> None:
        """Takes the hooks off the module."""
        for handle in self._handles:
            handle.remove()


class _Hook:
    """A hook that holds its owner; copied or pickled it is one that does nothing."""

    def __init__(self, owner: Any = None, call: Callable[..., None] | None = None) -> None:
        self._owner, self._call = owner, call

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling() or self._call is None:
            return
        self._call(module)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()


class _BreakingHook(_Hook):
    """A hook that runs in compiled code as well, and breaks its graph."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self._call is not None:
            self._call(module)


class _OutputHook(_Hook):
    def __call__(self, module: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling() or self._call is None or not torch.is_grad_enabled():
            return
        call = weakref.WeakMethod(self._call)
        for output in _pytree.tree_leaves(args[-1]):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(_Later(call))


class _Later:
    """Calls a method of an object that may be gone. Changes no gradient."""

    def __init__(self, method: weakref.WeakMethod[Any]) -> None:
        self._method = method

    def __call__(self, gradient: torch.Tensor) -> None:
        method = self._method()
        if method is not None:
            method()


def _ignored(module: nn.Module) -> set[str]:
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters by the names of the unwrapped module."""
    named = list(module.named_parameters())
    return dict(zip(strip_wrappers([name for name, _ in named]), (param for _, param in named), strict=True))


def _tables(module: nn.Module) -> list[tuple[Mapping[str, Any], list[int]]]:
    tables = [table for child in module.modules() for table in (child._parameters, child._modules) if table]
    return [(table, [*map(id, table.values())]) for table in tables]
