"""Where in a kernel's source something happens: the innermost frame that belongs to the kernel's author."""

from __future__ import annotations

import os
from pathlib import Path
from types import CodeType, FrameType

import atlas_lab.kernels.lang as lang

Site = tuple[CodeType, int]

# Intrinsics and the interpreter itself are not where a kernel's author wants to be sent.
_OURS = (str(Path(lang.__file__).parent) + os.sep, str(Path(__file__).parent) + os.sep)
_internal: dict[str, bool] = {}


def _is_internal(name: str) -> bool:
    known = _internal[name] = name.startswith(_OURS)
    return known


def site_of(frame: FrameType | None) -> Site | None:
    """Code and instruction of the nearest frame outside the language and the interpreter; a line costs more."""
    internal = _internal
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if not (internal[name] if name in internal else _is_internal(name)):
            return code, frame.f_lasti
        frame = frame.f_back
    return None


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
