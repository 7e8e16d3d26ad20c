"""Where in a kernel's source something happens: the innermost frame of kernel code, outside every intrinsic."""

from __future__ import annotations

import os
from pathlib import Path
from types import CodeType, FrameType

import atlas_lab.kernels.lang as lang
from atlas_lab.kernels.lang.op import Op

Site = tuple[CodeType, int]

# Intrinsics and the interpreter itself are not where a kernel's author wants to be sent.
_OURS = (str(Path(lang.__file__).parent) + os.sep, str(Path(__file__).parent) + os.sep)
_internal: dict[str, bool] = {}
_CALL = Op.__call__.__code__


def _is_internal(name: str) -> bool:
    known = _internal[name] = name.startswith(_OURS)
    return known


def site_of(frame: FrameType | None) -> Site | None:
    """Code and instruction of the nearest frame of kernel code. Its line costs more, so it is looked up later.

    An intrinsic may be implemented anywhere, so what runs inside a call of one never counts, but for device functions
    that an implementation calls.
    """
    internal = _internal
    found: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if internal[name] if name in internal else _is_internal(name):
            if found is not None:
                if code is not _CALL:
                    break
                found = None
        elif found is None:
            found = frame
        frame = frame.f_back
    return (found.f_code, found.f_lasti) if found is not None else None


def operation_of(frame: FrameType | None) -> Op | None:
    """The intrinsic that a frame runs in, as the kernel called it."""
    found: Op | None = None
    while frame is not None:
        if frame.f_code is _CALL:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


def raised_at(e: BaseException) -> Site | None:
    """Where in kernel code an exception began: in the innermost frame of it, though an intrinsic raised."""
    found = None
    tb = e.__traceback__
    while tb is not None and tb.tb_frame.f_code is not _CALL:
        if not _is_internal(tb.tb_frame.f_code.co_filename):
            found = tb.tb_frame.f_code, tb.tb_lasti
        tb = tb.tb_next
    return found


def place(site: Site | None) -> tuple[str | None, int | None]:
    """File, relative to the working directory where it is below it, and line of a site."""
    if site is None:
        return None, None
    code, at = site
    line = next((line for start, end, line in code.co_lines() if start <= at < end), None)
    name = code.co_filename
    here = os.getcwd() + os.sep
    return name.removeprefix(here), line or code.co_firstlineno


def spell(site: Site | None) -> str:
    """`file:line`, for sentences."""
    file, line = place(site)
    return f"{file}:{line}" if file else "an unknown line"


def ranges(numbers: list[int]) -> str:
    """`1, 4 to 7`, for sentences; `numbers` ascend."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)
