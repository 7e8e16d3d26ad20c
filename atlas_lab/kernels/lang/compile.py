"""Kernels to machine code, with no GPU and no driver: LLVM, LTO-IR, link, and what the assembler reports.

Numba and the CUDA compiler are imported when something is compiled, never before; what the disk cache knows needs
neither.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from atlas_lab.kernels.lang import cache
from atlas_lab.kernels.lang.diagnose import diagnose
from atlas_lab.kernels.lang.fingerprint import fingerprint
from atlas_lab.kernels.lang.kernel import Kernel, KernelError
from atlas_lab.kernels.lang.op import Needs

ARCHITECTURES = ("sm_80", "sm_90a", "sm_120a")
_INSTALL = "install it with: pip install 'atlas-lab[cu13]'"


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code for one architecture, and the assembler's report. Sizes are in bytes: spills and
    stack a thread, static shared memory a block. `warnings` are the lines that warn, those with a C75xx code of
    lost performance too; `log` is everything the linker and ptxas said, `ptx` what was assembled."""

    entry: str
    arch: str
    cubin: bytes
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    barriers: int
    warnings: tuple[str, ...]
    log: str
    ptx: str


def architectures(needs: Needs) -> tuple[str, ...]:
    """The architectures we compile for that have what `needs` says, oldest first."""
    return tuple(a for a in ARCHITECTURES if needs.met_by(_capability(a)[:2]))


def _capability(arch: str) -> tuple[int, int, str]:
    try:
        parsed = Needs.parse(arch)
    except ValueError as e:
        raise KernelError(str(e)) from None
    return (*parsed.capability, parsed.suffix)


@functools.cache
def compiler_missing() -> str | None:
    """None if kernels can be compiled here; otherwise a sentence that says what is missing and how to get it."""
    try:
        from cuda.bindings import nvjitlink
        from cuda.core import Linker  # noqa: F401
        from numba.cuda.cudadrv import nvvm

        nvvm.NVVM()
        nvjitlink.version()
        from atlas_lab.kernels.lang import build  # noqa: F401
    except Exception as e:
        return f"the CUDA compiler cannot be loaded ({type(e).__name__}: {_first_line(e)}); {_INSTALL}"
    return None


def compile_kernel(kernel: Kernel, arch: str) -> Compiled:
    """Machine code of a kernel for an architecture such as "sm_90a"; from memory or the disk cache where known.

    Raises KernelError, in one sentence, for a kernel that cannot be typed, lowered or assembled, hardware that
    lacks what its intrinsics need, or a missing compiler.
    """
    known = _MEMO.get((kernel, arch))
    if known is None:
        known = _MEMO[kernel, arch] = _compile(kernel, arch)
    return known


_MEMO: dict[tuple[Kernel, str], Compiled] = {}


def _compile(kernel: Kernel, arch: str) -> Compiled:
    _refuse(kernel, arch)
    mark = fingerprint(kernel, arch)
    key = cache.follow(mark) if mark else None
    found = cache.load(key) if key else None
    if found is None:
        ltoir = _ltoir(kernel, arch)
        limit = _options(kernel).get("max_registers")
        key = cache.digest(ltoir, kernel.entry, arch, str(limit), *_toolchain(), *Compiled.__dataclass_fields__)
        found = cache.load(key)
        if found is None:
            cubin, log = _link(kernel, arch, ltoir, "cubin", limit)
            text, _ = _link(kernel, arch, ltoir, "ptx")
            found = {**_report(kernel, arch, log), "ptx": text.decode().replace("\0", "")}, cubin
            cache.store(key, *found)
        if mark:
            cache.lead(mark, key)
    report, cubin = found
    return Compiled(kernel.entry, arch, cubin, **{**report, "warnings": tuple(report["warnings"])})


def _refuse(kernel: Kernel, arch: str) -> None:
    """Raises KernelError for what need not be compiled to be wrong."""
    capability = _capability(arch)
    if not kernel.needs.met_by(capability[:2]):
        raise KernelError(f"kernel {kernel.entry} for {arch}: its intrinsics need {kernel.needs}")
    if _options(kernel).get("fastmath"):
        raise KernelError(f"kernel {kernel.entry} for {arch}: fastmath is not allowed, it changes roundings")


def _ltoir(kernel: Kernel, arch: str) -> bytes:
    """LTO-IR of a kernel; the same source gives the same bytes in every process."""
    missing = compiler_missing()
    if missing is not None:
        raise KernelError(f"kernel {kernel.entry} for {arch}: {missing}")
    from atlas_lab.kernels.lang import build

    try:
        modules = build.llvm_modules(kernel, _capability(arch))
    except Exception as e:
        raise KernelError(f"kernel {kernel.entry} for {arch}: {diagnose(e, kernel.function)}") from e
    try:
        return build.ltoir(modules, arch)
    except Exception as e:
        raise KernelError(f"kernel {kernel.entry} for {arch}: NVVM refused its code: {_first_line(e)}") from e


def _options(kernel: Kernel) -> dict[str, Any]:
    """Options given to `cuda.jit`, for a wrapped dispatcher."""
    options: dict[str, Any] = kernel.dispatcher.targetoptions if kernel.dispatcher is not None else {}
    return options


def _link(kernel: Kernel, arch: str, ltoir: bytes, kind: str, max_registers: int | None = None) -> tuple[bytes, str]:
    """A cubin, or the PTX after link-time optimization, and the log."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(
        arch=arch,
        link_time_optimization=True,
        ptx=kind == "ptx" or None,
        max_register_count=max_registers,
        ptxas_options=["-v"],
        no_cache=True,  # a hit in its cache has no report
    )
    linker = None
    try:
        linker = Linker(ObjectCode.from_ltoir(ltoir), options=options)
        linked = linker.link(kind)
    except Exception as e:
        said = "; ".join(_lines(linker.get_error_log())) if linker is not None else ""
        raise KernelError(f"kernel {kernel.entry} for {arch}: linking failed: {said or _first_line(e)}") from e
    return bytes(linked.code), linker.get_info_log() + linker.get_error_log()


@functools.cache
def _toolchain() -> tuple[str, ...]:
    """Versions of what turns LTO-IR into machine code."""
    from cuda.bindings import nvjitlink

    try:
        wheel = metadata.version("nvidia-nvjitlink")
    except metadata.PackageNotFoundError:
        wheel = ""
    return (".".join(map(str, nvjitlink.version())), wheel)


_FIELDS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "shared": re.compile(r"(\d+) bytes smem"),
    "barriers": re.compile(r"used (\d+) barriers"),
}
_WARNS = re.compile(r"\bwarning\b|\(C\d+\)|Potential Performance Loss", re.IGNORECASE)


def _report(kernel: Kernel, arch: str, log: str) -> dict[str, Any]:
    """What ptxas says of the one function in the cubin."""
    found = {name: pattern.search(log) for name, pattern in _FIELDS.items()}
    if found["registers"] is None:
        raise KernelError(f"kernel {kernel.entry} for {arch}: ptxas reported no registers: {' '.join(_lines(log))}")
    warnings = [line for line in _lines(log) if _WARNS.search(line)]
    return {**{n: int(m[1]) if m else 0 for n, m in found.items()}, "warnings": warnings, "log": log}


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\0", "").splitlines() if line.strip()]


def _first_line(error: BaseException) -> str:
    return next(iter(_lines(str(error))), type(error).__name__)


def ptx(kernel: Kernel, arch: str) -> str:
    """The PTX that is assembled: after link-time optimization. Raises KernelError as `compile_kernel`."""
    return compile_kernel(kernel, arch).ptx


def sass(kernel: Kernel, arch: str) -> str:
    """The machine code as text. Raises KernelError as `compile_kernel`, and without nvdisasm."""
    tool = _nvdisasm()
    if tool is None:
        raise KernelError(
            f"kernel {kernel.entry} for {arch}: nvdisasm is not installed; "
            "install it with: pip install nvidia-cuda-nvdisasm"
        )
    compiled = compile_kernel(kernel, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.cubin)
        f.flush()
        done = subprocess.run([tool, "-c", f.name], capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(_lines(done.stderr))
        raise KernelError(f"kernel {kernel.entry} for {arch}: nvdisasm failed: {said}")
    return done.stdout


def _nvdisasm() -> str | None:
    from cuda import pathfinder

    found: str | None = pathfinder.find_nvidia_binary_utility("nvdisasm")
    return found if found and Path(found).exists() else None


_FLAGGED = (
    (re.compile(r"\.f64\b"), "64-bit floating point (u64 with i64 gives float64 in Numba; so does a float literal)"),
    (re.compile(r"^\s*(?:@\S+\s+)?call\b", re.MULTILINE), "a function call"),
    (re.compile(r"\.local\b"), "local memory (a tuple indexed by a run-time value?)"),
)


def check_kernel(kernel: Kernel, arch: str) -> tuple[str, ...]:
    """What is wrong with a kernel's machine code, a sentence each; empty if nothing is.

    Spills, a stack frame, any warning, and in the PTX float64, calls or local memory.
    """
    compiled = compile_kernel(kernel, arch)
    problems = []
    if compiled.spill_stores or compiled.spill_loads:
        problems.append(f"spills {compiled.spill_stores} bytes out and {compiled.spill_loads} bytes in")
    if compiled.stack:
        problems.append(f"has a stack frame of {compiled.stack} bytes")
    problems += [f"warns: {w}" for w in compiled.warnings]
    text = compiled.ptx
    for pattern, what in _FLAGGED:
        found = pattern.search(text)
        if found:
            line = text[text.rfind("\n", 0, found.end()) + 1 : text.find("\n", found.end())].strip()
            problems.append(f"uses {what}: {line}")
    return tuple(f"kernel {kernel.entry} for {arch} {p}" for p in problems)
