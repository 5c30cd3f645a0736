"""Every environment variable that gsync reads.

At build time:

GSYNC_BUILD
    What `pip install` builds. `auto` (default) takes the most that the machine allows; the others build just that or stop.
    `cuda`: C++ for the CPU, CUDA C++, and the NCCL transport. `cpu`: C++ for the CPU. `python`: nothing is compiled.

The build also respects CXX, CUDA_HOME, TORCH_CUDA_ARCH_LIST (default: 8.0;9.0;10.0+PTX) and MAX_JOBS, as PyTorch documents
them.

At run time:

GSYNC_NATIVE
    `auto` (default) loads the compiled extension if it is there; `off` leaves it alone, as if it had not been built.
GSYNC_DEBUG
    `1` compares parameters, buckets and gradient norms between ranks in every step (docs/robustness.md); `0` (default) does not.
GSYNC_LOCAL_WORLD_SIZE
    Ranks that share a host, for exchange="hierarchical" and "auto": those of the world from a multiple of it on. Default: what
    the launcher says, else the hosts' names (gsync/hosts.py). Read when the ranks of a model first meet, the others once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

LOCAL_WORLD_SIZE = "GSYNC_LOCAL_WORLD_SIZE"
BUILD_CHOICES = ("auto", "cpu", "cuda", "python")
NATIVE_CHOICES = ("auto", "off")
DEBUG_CHOICES = ("0", "1")


@dataclass(frozen=True)
class Environment:
    """The values of gsync's environment variables."""

    build: str = "auto"
    native: str = "auto"
    debug: bool = False


def read(environ: Mapping[str, str] = os.environ) -> Environment:
    """Return the variables as `environ` has them.

    Raises:
        ValueError: a variable has a value that is not among its choices.
    """
    return Environment(
        build=_choice(environ, "GSYNC_BUILD", BUILD_CHOICES),
        native=_choice(environ, "GSYNC_NATIVE", NATIVE_CHOICES),
        debug=_choice(environ, "GSYNC_DEBUG", DEBUG_CHOICES) == "1",
    )


def _choice(environ: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = environ.get(name, "").strip().lower() or choices[0]
    if value not in choices:
        raise ValueError(f"{name}={environ[name]!r}: expected one of {', '.join(choices)}")
    return value


ENV = read()
