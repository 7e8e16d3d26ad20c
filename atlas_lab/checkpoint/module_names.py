"""How configs name modules: with other prefixes than the checkpoint's tensors, fused, by wildcard or by expression."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from atlas_lab.checkpoint.patterns import Budget, Name, Pattern
from atlas_lab.checkpoint.schemes import Claim

# What may stand before `layers.0.mlp.gate_proj`: the whole model nests its language part, text-only exports and
# serving engines name it otherwise.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")

# Projections that engines fuse, by the last part of their name.
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}

_LONGEST = 500  # characters; a longer name is no module of a model that is read here


def spellings(module: str) -> tuple[str, ...]:
    """Every name that a config may call a module by; its own first."""
    stem = next((module.removeprefix(p) for p in PREFIXES if module.startswith(p)), module)
    parent, dot, last = stem.rpartition(".")
    stems = [stem, *([f"{parent}{dot}{FUSED[last]}"] if last in FUSED else [])]
    return tuple(dict.fromkeys((module, *(p + s for s in stems for p in (*PREFIXES, "")))))


@dataclass(frozen=True)
class Entry:
    """An entry of a list in a config: its text, what it claims, and the pattern it is, None for a plain name."""

    text: str
    claim: Claim
    pattern: Pattern | None = None


class Entries:
    """The entries of one list: what they claim of the modules they name.

    A plain name means a module under any of its spellings. A pattern is matched against the names that the checkpoint
    has; only one that matches none of them was written for other spellings and is matched against those.
    """

    def __init__(self, entries: Sequence[Entry], modules: Iterable[str], budget: Budget) -> None:
        self._plain: dict[str, list[Entry]] = {}
        for e in entries:
            if e.pattern is None:
                self._plain.setdefault(e.text, []).append(e)
        self._patterns = [e for e in entries if e.pattern is not None]
        self._modules = [Name(m, budget) for m in modules if len(m) <= _LONGEST] if self._patterns else []
        self._budget = budget
        self._elsewhere: dict[int, bool] = {}

    def named(self, module: str) -> list[Claim]:
        """Of the entries that are a name of the module."""
        return self._of(spellings(module))

    def matching(self, module: str) -> list[Claim]:
        """Of the patterns that match the module."""
        if not self._patterns:
            return []
        own, *others = (Name(s, self._budget) for s in spellings(module))
        return [
            e.claim
            for i, e in enumerate(self._patterns)
            if _matches(e, own) or (self._is_for_others(i) and any(_matches(e, name) for name in others))
        ]

    def within(self, module: str) -> list[Claim]:
        """Of the entries that are a parent of the module, or some consecutive parts of its name: `linear_attn`."""
        return self._of(run for s in spellings(module) for run in _runs(s))

    def beginning(self, module: str) -> list[Claim]:
        """Of the entries that are a parent of the module, or any end of its name: `gate_proj`, `_proj`."""
        found: dict[str, None] = {}
        for s in spellings(module):
            found |= dict.fromkeys(s[i:] for i in range(len(s)))
            found |= dict.fromkeys(s[: i + dot] for i, c in enumerate(s) if c == "." for dot in (0, 1))
        return self._of(found)

    def _of(self, names: Iterable[str]) -> list[Claim]:
        return [e.claim for n in dict.fromkeys(names) for e in self._plain.get(n, ())]

    def _is_for_others(self, i: int) -> bool:
        if i not in self._elsewhere:
            self._elsewhere[i] = not any(_matches(self._patterns[i], m) for m in self._modules)
        return self._elsewhere[i]


def _matches(e: Entry, name: Name) -> bool:
    assert e.pattern is not None
    return e.pattern.matches(name)


def _runs(name: str) -> Iterator[str]:
    parts = name.split(".")
    for i in range(len(parts)):
        for j in range(i + 1, len(parts) + 1):
            yield ".".join(parts[i:j])
