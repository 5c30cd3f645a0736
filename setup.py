"""Builds gsync. What is compiled is decided in build_plan.py; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

import build_plan  # noqa: E402

# -ffp-contract=off, --fmad=false: x*s+r in one rounding or two changes bits, and every backend must write the same.
# -fno-trapping-math: nobody looks at the processor's exception flags, and loops that choose between two sums vectorise (the
# fp16 loops stay partly scalar without it). It changes no value.
CXX_FLAGS = ["-O3", "-std=c++20", "-ffp-contract=off", "-fno-trapping-math", "-fvisibility=hidden", "-g0"]
CXX_FLAGS += ["-Wall", "-Wextra", "-Wno-unused-parameter"]
NVCC_FLAGS = ["-O3", "-std=c++20", "--fmad=false", "-lineinfo", "-Xcompiler=-fvisibility=hidden,-ffp-contract=off,-fPIC"]


def requested_build() -> str:
    """Return GSYNC_BUILD. The variable is documented in gsync/env.py, which imports nothing of gsync."""
    spec = importlib.util.spec_from_file_location("gsync_env", ROOT / "gsync" / "env.py")
    assert spec and spec.loader
    env = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = env
    try:
        spec.loader.exec_module(env)
    except ValueError as error:
        raise build_plan.BuildError(str(error)) from None
    return env.ENV.build


def find_sources(with_cuda: bool) -> list[str]:
    """Return every C++ file under csrc, and every CUDA file when asked for, relative to the root."""
    patterns = ["**/*.cpp"] + (["**/*.cu"] if with_cuda else [])
    found = [file for pattern in patterns for file in (ROOT / "csrc").glob(pattern)]
    if not with_cuda:
        found = [file for file in found if file.parent.name != "cuda"]
    sources = sorted(str(file.relative_to(ROOT)) for file in found)
    stems = [source.rsplit(".", 1)[0] for source in sources]
    clash = sorted({stem for stem in stems if stems.count(stem) > 1})
    if clash:
        raise build_plan.BuildError(f"{clash[0]}.cpp and {clash[0]}.cu would share one object file; rename one of them")
    return sources


def make_extension(plan: build_plan.Plan) -> Extension:
    """Return the extension gsync._C as `plan` wants it."""
    with_cuda = plan.kind == "cuda"
    torch_include = [plan.torch.folder / "include", plan.torch.folder / "include" / "torch" / "csrc" / "api" / "include"]
    # As system folders: warnings are about gsync's own code.
    system = [f"-isystem{folder}" for folder in torch_include]
    libraries = ["c10", "torch_cpu", "torch", "torch_python"]
    link = ["-Wl,--as-needed", "-Wl,-O1"]
    define = []
    if with_cuda:
        system += [f"-isystem{folder}" for folder in plan.toolkit.include_dirs]
        libraries += ["c10_cuda", "torch_cuda"]
        link += [str(plan.toolkit.cudart)]
        define = ["-DGSYNC_WITH_CUDA"]
    return Extension(
        "gsync._C",
        sources=find_sources(with_cuda),
        depends=[str(file.relative_to(ROOT)) for file in sorted((ROOT / "csrc").glob("**/*.*h"))],
        include_dirs=[str(ROOT / "csrc")],
        library_dirs=[str(plan.torch.folder / "lib")],
        libraries=libraries,
        extra_compile_args={"cxx": CXX_FLAGS + define + system, "nvcc": NVCC_FLAGS + define},
        extra_link_args=link,
        language="c++",
    )


def one_word_compiler(command: tuple[str, ...]) -> str:
    """Return a script that runs `command`: torch's helper takes "ccache g++" for the name of one program."""
    script = ROOT / "build" / "cxx"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    script.chmod(0o755)
    return str(script)


def build_ext_command(plan: build_plan.Plan) -> type:
    """Return the build_ext command. It imports torch's build helper, so only native builds ask for it."""
    # Read by torch's helper when it is imported or run.
    os.environ.setdefault("TORCH_DONT_CHECK_COMPILER_ABI", "1")
    # Without a launcher such as ccache: distutils would take that for the compiler, nvcc would pass it on as its host compiler.
    os.environ["CC"] = plan.compiler[-1]
    if len(plan.compiler) > 1:
        os.environ["CXX"] = one_word_compiler(plan.compiler)
        os.environ["TORCH_NO_COMPILER_WRAPPER"] = "1"
    if plan.toolkit:
        os.environ["CUDA_HOME"] = str(plan.toolkit.home)
        os.environ["TORCH_CUDA_ARCH_LIST"] = plan.archs
    if not os.environ.get("MAX_JOBS"):
        os.environ["MAX_JOBS"] = str(build_plan.default_jobs())
    from torch.utils.cpp_extension import BuildExtension

    class BuildNative(BuildExtension):
        """Compiles into a folder that stays, so that the next build compiles only what changed."""

        def finalize_options(self) -> None:
            super().finalize_options()
            tag = f"{sys.implementation.cache_tag}-torch{plan.torch.version}-{plan.kind}"
            self.build_temp = str(ROOT / "build" / tag)

    return BuildNative


def build_info(plan: build_plan.Plan) -> str:
    """Return the text of gsync/_build_info.py, from which the import tells whether the extension fits."""
    facts = {
        "KIND": plan.kind,
        "TORCH": plan.torch.version if plan.torch and plan.kind != "python" else None,
        "TORCH_CUDA": plan.torch.cuda if plan.torch and plan.kind != "python" else None,
        "CUDA": plan.toolkit.version if plan.toolkit else None,
        "ARCHS": plan.archs,
        "REASON": plan.reason,
    }
    return '"""Written by the build."""\n\n' + "".join(f"{name} = {value!r}\n" for name, value in facts.items())


def build_py_command(plan: build_plan.Plan) -> type:
    """Return the build_py command, which also writes gsync/_build_info.py beside the modules."""

    class BuildPython(build_py):
        def run(self) -> None:
            editable = getattr(self, "editable_mode", False)
            folder = (ROOT if editable else Path(self.build_lib)) / "gsync"
            if not editable:
                shutil.rmtree(folder, ignore_errors=True)  # modules that an earlier build left
            super().run()
            (folder / "_build_info.py").write_text(build_info(plan))

    return BuildPython


def tell(plan: build_plan.Plan, request: str) -> None:
    """Print what is built. pip hides that without -v, so a terminal is told of a fallback to pure Python all the same."""
    print(plan.summary(), file=sys.stderr, flush=True)
    if plan.kind == "python" and request == "auto" and not sys.stderr.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\n{plan.summary()}\n")


def main() -> None:
    request = requested_build()
    extensions: list[Extension] = []
    commands: dict[str, type] = {}
    # Only these commands look at the machine; an sdist or the metadata are the same everywhere.
    if any(word.startswith(("build", "bdist", "editable", "install", "develop")) for word in sys.argv[1:]):
        plan = build_plan.choose(request)
        tell(plan, request)
        commands["build_py"] = build_py_command(plan)
        if plan.kind != "python":
            extensions = [make_extension(plan)]
            commands["build_ext"] = build_ext_command(plan)
    setup(ext_modules=extensions, cmdclass=commands, license="BSD-3-Clause")


main()
