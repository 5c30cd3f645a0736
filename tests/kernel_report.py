"""What the compilers made of the GPU kernels, found without a GPU.

    python tests/kernel_report.py cuda [ARCH ...]      csrc/cuda/*.cu through nvcc
    python tests/kernel_report.py triton [ARCH ...]    kernels/*.py through Triton, ahead of time
    python tests/kernel_report.py budgets              writes tests/kernel_budgets.json: what the CUDA kernels have now

prints one JSON object: {"sm_90": {"pack_kernel<128>": {"registers": 64, "spill_bytes": 0, ...}}}. Tests check it, and hold
the CUDA kernels to their budgets; the table of docs/architecture.md quotes it. Per kernel:

    registers            of a thread
    spill_bytes          stores and loads of spilled registers
    local_bytes          local memory of a thread
    shared_bytes         static and, for Triton, dynamic shared memory of a block
    loads_16, stores_16  16-byte accesses to global memory in the machine code
    generic              accesses to memory of a space that the compiler does not know
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARCHS = (80, 90, 100)
NVCC_FLAGS = ("-std=c++20", "-O3", "--fmad=false")
BUDGETS = ROOT / "tests" / "kernel_budgets.json"
# What a kernel should have little of, and much of.
COSTS, WIDTHS = ("registers", "spill_bytes", "local_bytes", "shared_bytes", "generic"), ("loads_16", "stores_16")

# A bucket's arguments as the launchers pass them. Tensors come from torch's allocators, so their addresses are multiples of 16.
TRITON_SIGNATURES = {
    "pack_kernel": "shares:*i64 tiles:*i32 pointers:*i64 payload:*u8 counters:*i64 chunk_bytes:i64 scale:fp32",
    "reduce_kernel": "shares:*i64 tiles:*i32 payloads:*i64 out:*u8 num_payloads:i32 scale:fp32",
    "unpack_kernel": "shares:*i64 tiles:*i32 pointers:*i64 payload:*u8 partials:*fp64 found_nonfinite:*i32 ticket:*i32 "
    "segments:*i64 sum_of_squares:*fp64 failed:*i32 chunk_bytes:i64 num_tiles:i32 num_segments:i32",
}


def find_toolkit() -> Any:
    """The CUDA toolkit that the build would use, or None."""
    sys.path.insert(0, str(ROOT))
    try:
        import build_plan
    finally:
        sys.path.remove(str(ROOT))
    return build_plan.find_toolkit()


def built_report(extension: Path, archs: tuple[int, ...] = ARCHS) -> dict[str, dict[str, Any]]:
    """As `cuda_report`, from an extension that has been built: seconds instead of minutes. {} where it cannot tell all of it.

    What was spilled is not in machine code, only that there is a stack: the kernels should have none.
    """
    report: dict[str, dict[str, Any]] = {}
    sources = [file for part in ("cuda", "codecs", "common") for file in (ROOT / "csrc" / part).iterdir()]
    if extension.stat().st_mtime < max(file.stat().st_mtime for file in sources):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        _run([_tool("cuobjdump"), "-xelf", "all", str(extension)], folder)
        for cubin in sorted(Path(folder).glob("*.cubin")):
            arch = re.findall(r"sm_(\d+)", cubin.name)[-1]
            if int(arch) not in archs:
                continue
            usage = _run([_tool("cuobjdump"), "-res-usage", str(cubin)])
            accesses = _count_accesses(cubin)
            for part in re.split(r"Function ", usage)[1:]:
                name = part.split(":", 1)[0]
                has = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", part)}
                if has["STACK"] or has["LOCAL"]:
                    return {}
                # From sm_90 on cuobjdump adds what the driver keeps for itself, where a kernel has any of its own.
                shared = max(has["SHARED"] - (1024 if int(arch) >= 90 else 0), 0)
                resources = {"registers": has["REG"], "spill_bytes": 0, "local_bytes": 0, "shared_bytes": shared}
                report.setdefault(f"sm_{arch}", {})[plain_name(name)] = {**resources, **accesses[name]}
    return report if len(report) == len(archs) else {}


def cuda_report(archs: tuple[int, ...] = ARCHS) -> dict[str, dict[str, Any]]:
    """Compile every .cu for each architecture; raises with the compiler's words if one fails."""
    toolkit = find_toolkit()
    if toolkit is None:
        raise FileNotFoundError("nvcc is not to be found")
    report: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arch in archs:
            kernels = report.setdefault(f"sm_{arch}", {})
            for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
                cubin = Path(folder, f"{source.stem}_{arch}.cubin")
                includes = [word for path in toolkit.include_dirs for word in ("-isystem", path)]
                command = [toolkit.nvcc, *NVCC_FLAGS, *includes, f"-arch=sm_{arch}", "-Xptxas=-v", "-cubin", "-o", cubin, source]
                told = _run([str(word) for word in command])
                accesses = _count_accesses(cubin)
                for name, resources in _parse_ptxas(told).items():
                    kernels[plain_name(name)] = {**resources, **accesses[name]}
    return report


def triton_report(archs: tuple[int, ...] = ARCHS) -> dict[str, dict[str, Any]]:
    """Compile every Triton kernel for each architecture. Needs a process without TRITON_INTERPRET."""
    from gsync.kernels import elementwise
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    report: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arch in archs:
            for name, text in TRITON_SIGNATURES.items():
                signature = dict(word.split(":") for word in text.split())
                pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
                attributes = {(i,): [["tt.divisibility", 16]] for i in pointers}
                source = ASTSource(getattr(elementwise, name), signature, {}, attributes)
                options = {"num_warps": elementwise.NUM_WARPS, "enable_fp_fusion": False}
                kernel = compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=options)
                cubin = Path(folder, f"{name}_{arch}.cubin")
                cubin.write_bytes(kernel.asm["cubin"])
                usage = _run([_tool("cuobjdump"), "-res-usage", str(cubin)])
                ptx = kernel.asm["ptx"]
                report.setdefault(f"sm_{arch}", {})[name] = {
                    "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
                    "spill_bytes": 0 if not re.search(r"\b(ld|st)\.local", ptx) else 1,
                    "local_bytes": int(re.findall(r"LOCAL:(\d+)", usage)[0]) + int(re.findall(r"STACK:(\d+)", usage)[0]),
                    "shared_bytes": kernel.metadata.shared,
                    **_count_accesses(cubin)[name],
                    "ptx_loads_v4": len(re.findall(r"ld\.global\.v4\.b32", ptx)),
                    "ptx_stores_v4": len(re.findall(r"st\.global\.v4\.b32", ptx)),
                }
    return report


def compare(found: dict[str, dict[str, Any]], budgets: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return what got worse than its budget and what got better; kernels on one side only count as worse."""
    losses, gains = [], []
    for arch in sorted(found.keys() | budgets.keys()):
        has, may = found.get(arch, {}), budgets.get(arch, {})
        for kernel in sorted(has.keys() | may.keys()):
            if kernel not in has or kernel not in may:
                losses.append(f"{arch} {kernel}: {'it is gone' if kernel in may else 'it has no budget'}")
                continue
            for name in (*COSTS, *WIDTHS):
                change = has[kernel][name] - may[kernel][name]
                if change:
                    is_loss = change > 0 if name in COSTS else change < 0
                    text = f"{arch} {kernel}: {name} {has[kernel][name]}, budget {may[kernel][name]}"
                    (losses if is_loss else gains).append(text)
    return losses, gains


def write_budgets() -> None:
    """Write what the kernels have now, with the version of the compiler, of which these numbers are a property too."""
    budgets = {"nvcc": find_toolkit().version, "kernels": cuda_report()}
    text = json.dumps(budgets, indent=1, sort_keys=True)
    BUDGETS.write_text(re.sub(r'\{\s+("(?:[a-z_0-9]+)": \d+(?:,\s+"[a-z_0-9]+": \d+)*)\s+\}', _on_one_line, text) + "\n")


def _on_one_line(found: re.Match[str]) -> str:
    return "{" + " ".join(found.group(1).split()) + "}"


def _parse_ptxas(told: str) -> dict[str, dict[str, int]]:
    """Resources by mangled name, from `ptxas -v`."""
    kernels: dict[str, dict[str, int]] = {}
    for part in re.split(r"Compiling entry function '", told)[1:]:
        name = part.split("'", 1)[0]
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", part)
        registers = re.findall(r"Used (\d+) registers", part)
        shared = re.findall(r"(\d+) bytes smem", part)
        stack = re.findall(r"(\d+) bytes stack frame", part)
        kernels[name] = {
            "registers": int(registers[0]),
            "spill_bytes": sum(map(int, spills)),
            "local_bytes": int(stack[0]),
            "shared_bytes": int(shared[0]) if shared else 0,
        }
    return kernels


def _count_accesses(cubin: Path) -> dict[str, dict[str, int]]:
    """16-byte accesses to global memory by mangled name, from the disassembly."""
    counts: dict[str, dict[str, int]] = {}
    for part in re.split(r"Function : ", _run([_tool("cuobjdump"), "-sass", str(cubin)]))[1:]:
        counts[part.split(None, 1)[0]] = {
            "loads_16": len(re.findall(r"\bLDG\.E\.(?:\w+\.)*128\b", part)),
            "stores_16": len(re.findall(r"\bSTG\.E\.(?:\w+\.)*128\b", part)),
            "generic": len(re.findall(r"\b(?:LD|ST)\.E\b", part)),
        }
    return counts


def plain_name(mangled: str) -> str:
    """pack_kernel<128> for the mangled name of that instance."""
    found = re.search(r"\d([a-z_]+_kernel)(?:ILi(\d+)E)?", mangled)
    if not found:
        return mangled
    return found.group(1) + (f"<{found.group(2)}>" if found.group(2) else "")


def _tool(name: str) -> str:
    """cuobjdump or nvdisasm: the toolkit's, or the one in Triton's wheel."""
    import importlib.util

    on_path = shutil.which(name)
    if on_path:
        return on_path
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        wheel = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
        if wheel.is_file():
            return str(wheel)
    raise FileNotFoundError(f"{name} is neither on PATH nor in Triton's wheel")


def _run(command: list[str], folder: str | None = None) -> str:
    # cuobjdump calls nvdisasm, which lies beside it.
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])
    env = {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=env, cwd=folder)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    if sys.argv[1:] == ["budgets"]:
        write_budgets()
    else:
        which = {"cuda": cuda_report, "triton": triton_report}[sys.argv[1]]
        print(json.dumps(which(tuple(map(int, sys.argv[2:])) or ARCHS), indent=2))
