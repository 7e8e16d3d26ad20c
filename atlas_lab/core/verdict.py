"""Whether an arm may serve a projection, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """Yes, or no with a code, a sentence, the value found and the values allowed.

    `code` is stable and short (`k-multiple`, `scale-geometry`, `needs`, `source`, `role`, `error`); `sentence` is
    for people.
    """

    ok: bool
    code: str = ""
    sentence: str = ""
    found: str = ""
    allowed: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return "yes"
        parts = (self.found and f"found {self.found}", self.allowed and f"expected {self.allowed}")
        detail = ", ".join(p for p in parts if p)
        return f"{self.sentence} ({detail})" if detail else self.sentence


def yes() -> Verdict:
    """The arm may serve."""
    return Verdict(True)


def no(code: str, sentence: str, *, found: Any = "", allowed: Any = "") -> Verdict:
    """The arm may not serve: `no("k-multiple", "K must be a multiple of 4", found=p.k, allowed="4, 8, ...")`."""
    return Verdict(False, code, sentence, str(found), str(allowed))
