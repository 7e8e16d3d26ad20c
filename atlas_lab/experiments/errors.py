"""What stops an experiment before it ran, and what stopped a part of it, in one sentence."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting, a file or an experiment that cannot be used; one sentence that names where it stands."""


def sentence(e: BaseException) -> str:
    """An exception of foreign code as results say it, with where a kernel raised it."""
    where = "".join(f" ({note})" for note in getattr(e, "__notes__", ()))
    return f"{type(e).__name__}: {' '.join(str(e).split())}{where}"
