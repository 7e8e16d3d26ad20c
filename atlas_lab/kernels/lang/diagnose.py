"""From one of Numba's exceptions to a sentence and the source line that it is about."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r'(?:File "([^"]+)", line (\d+)|\bat (\S+\.py) \((\d+)\))')
_NOISE = ("Failed in", "During:", "File ", "Enable logging")


def diagnose(error: BaseException, function: Callable[..., Any]) -> str:
    """`file:line: source: what is wrong`, as far as the exception tells."""
    text = _COLOUR.sub("", str(error))
    return ": ".join(part for part in (_where(error, text, function), _what(text) or type(error).__name__) if part)


def _what(text: str) -> str:
    """The first informative lines of Numba's report, as one line."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(_NOISE)]
    if not lines:
        return ""
    first = lines[0]
    if first.endswith("found for signature:") and len(lines) > 1:
        first = f"{first[:-1]} {lines[1].removeprefix('>>> ')}"
    return first.rstrip(".")


def _where(error: BaseException, text: str, function: Callable[..., Any]) -> str:
    """File, line and source of the innermost place in user code that the exception names."""
    for match in _FRAME.finditer(text):
        path, line = match[1] or match[3], int(match[2] or match[4])
        source = linecache.getline(path, line).strip()
        if source or match[3]:
            return _place(path, line, source)
    location = getattr(error, "loc", None) or _location(error)
    if location is not None:
        return _place(location.filename, location.line, linecache.getline(location.filename, location.line).strip())
    code = function.__code__
    return _place(code.co_filename, code.co_firstlineno, "")


def _location(error: BaseException) -> Any:
    """The location that Numba's type inference was working on when the exception passed through it."""
    found = None
    frame = error.__traceback__
    while frame is not None:
        holder = frame.tb_frame.f_locals.get("self")
        location = getattr(holder, "loc", None)
        if hasattr(location, "line") and hasattr(location, "filename"):
            found = location
        frame = frame.tb_next
    return found


def _place(path: str, line: int, source: str) -> str:
    return f"{Path(path).name}:{line}" + (f": `{source}`" if source else "")
