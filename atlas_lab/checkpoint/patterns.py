"""Patterns of module names, matched in bounded time.

Python's `re` backtracks: `(a+)+b` from a hostile config would never return. Here a pattern is a tree, and matching maps
the places where a part may begin to those where it may end, each a set of positions held as an integer with one bit
a position. That decides as `re.match` does, and the work is counted against a budget.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from atlas_lab.checkpoint.json_object import CheckpointError, brief

LONGEST = 2000  # characters of a pattern
DEEPEST = 40  # parentheses within parentheses
BUDGET = 10_000_000  # steps for all patterns of a checkpoint: seconds; 64 layers under a few take a hundredth of it
_MOST_REPEATS = 1000

_QUANTIFIER = re.compile(r"([*+?]|\{(?=[\d,])(\d*)(?:(,)(\d*))?\})([?+]?)")
_ESCAPE = re.compile(r"\\[dDwWsSnrtfv]|\\[^A-Za-z0-9]", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_LOOKS = {"(?=": (False, False), "(?!": (False, True), "(?<=": (True, False), "(?<!": (True, True)}


class Budget:
    """Steps left; `spend` raises CheckpointError when there are none."""

    def __init__(self, label: str, steps: int = BUDGET) -> None:
        self.label = label
        self.left = steps

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise CheckpointError(
                f"{self.label}: found patterns that take too many steps to match, expected simpler ones"
            )


class Name:
    """A name to match: the positions of each of its characters."""

    def __init__(self, text: str, budget: Budget) -> None:
        self.text = text
        self.budget = budget
        self.cost = 1 + len(text) // 64
        self._held: dict[re.Pattern[str], int] = {}

    @cached_property
    def places(self) -> Mapping[str, int]:
        self.budget.spend(len(self.text) * self.cost)
        places: dict[str, int] = {}
        for i, c in enumerate(self.text):
            places[c] = places.get(c, 0) | 1 << i
        return places

    def held(self, accepts: re.Pattern[str]) -> int:
        """The positions of the characters that a pattern of one character matches."""
        if accepts not in self._held:
            self.budget.spend(len(self.places))
            self._held[accepts] = sum(places for c, places in self.places.items() if accepts.match(c))
        return self._held[accepts]


class Node(Protocol):
    """A part of a pattern."""

    def ends(self, name: Name, starts: int) -> int:
        """The positions at which the part may end where it begins at one of `starts`."""
        ...


@dataclass(frozen=True)
class _Char:
    """One character of those that `accepts` (a class, an escape, a dot) matches."""

    accepts: re.Pattern[str]

    def ends(self, name: Name, starts: int) -> int:
        name.budget.spend(name.cost)
        return (starts & name.held(self.accepts)) << 1

    def runs(self, name: Name, starts: int) -> int:
        """The positions at which any number of them may end; in as many steps as the name's length has bits."""
        inside = name.held(self.accepts) << 1
        step = 1
        while step <= len(name.text):
            name.budget.spend(name.cost)
            starts |= inside & starts << step
            inside &= inside << step
            step *= 2
        return starts


@dataclass(frozen=True)
class _Literal:
    text: str

    def ends(self, name: Name, starts: int) -> int:
        name.budget.spend(name.cost * len(self.text))
        for c in self.text:
            starts = (starts & name.places.get(c, 0)) << 1
            if not starts:
                break
        return starts


@dataclass(frozen=True)
class _Place:
    """A position: `^`, `\\A` the start, `\\Z` the end, `$` the end or before a last newline, `\\b` a word's edge."""

    kind: str

    def ends(self, name: Name, starts: int) -> int:
        name.budget.spend(name.cost)
        size = len(name.text)
        if self.kind in ("^", "\\A"):
            return starts & 1
        if self.kind == "\\Z":
            return starts & 1 << size
        if self.kind == "$":
            return starts & (1 << size | (1 << size - 1 if name.text.endswith("\n") else 0))
        word = name.held(_WORD)
        edges = word ^ word << 1
        return starts & (edges if self.kind == "\\b" else ~edges)


@dataclass(frozen=True)
class _Sequence:
    parts: tuple[Node, ...]

    def ends(self, name: Name, starts: int) -> int:
        for part in self.parts:
            if not starts:
                break
            starts = part.ends(name, starts)
        return starts


@dataclass(frozen=True)
class _Either:
    parts: tuple[Node, ...]

    def ends(self, name: Name, starts: int) -> int:
        found = 0
        for part in self.parts:
            found |= part.ends(name, starts)
        return found


@dataclass(frozen=True)
class _Repeat:
    part: Node
    least: int
    most: int | None

    def ends(self, name: Name, starts: int) -> int:
        for _ in range(self.least):
            before, starts = starts, self.part.ends(name, starts)
            if starts in (0, before):
                break
        if self.most is None and isinstance(self.part, _Char):
            return self.part.runs(name, starts)
        found = front = starts
        # After as many rounds as the name has positions nothing is new.
        for _ in range(min(len(name.text) + 1, len(name.text) + 1 if self.most is None else self.most - self.least)):
            front = self.part.ends(name, front) & ~found
            if not front:
                break
            found |= front
        return found


@dataclass(frozen=True)
class _Look:
    """Whether the part matches ahead of a position, or behind it; or does not."""

    part: Node
    behind: bool
    absent: bool

    def ends(self, name: Name, starts: int) -> int:
        places = [1 << i for i in range(len(name.text) + 1)]
        name.budget.spend(len(places) * name.cost)
        if self.behind:
            found = 0
            for place in places:
                found |= self.part.ends(name, place)
        else:
            found = sum(place for place in places if starts & place and self.part.ends(name, place))
        return starts & (~found if self.absent else found)


@dataclass(frozen=True)
class Pattern:
    """A pattern that was read; every name that it matches begins with `prefix` and has the `needed` texts in it."""

    text: str
    root: Node
    prefix: str = ""
    needed: tuple[str, ...] = ()

    @classmethod
    def regex(cls, text: str, label: str) -> Pattern:
        """A regular expression, matched from a name's start as `re.match` does; raises CheckpointError, `label` first,
        for one that Python would refuse, and for flags, backreferences, possessive and atomic groups."""
        expected = "expected a regular expression of characters, classes, groups and repeats"
        if len(text) > LONGEST:
            raise CheckpointError(f"{label}: found {len(text)} characters, expected at most {LONGEST}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                re.compile(text)
            return cls._of(text, _Reader(text).whole())
        except (re.error, OverflowError, RecursionError, _UnknownError) as e:
            raise CheckpointError(f"{label}: found {brief(text)} ({e}), {expected}") from None

    @classmethod
    def glob(cls, text: str) -> Pattern:
        """A pattern of the whole name in which `*` stands for any characters and `?` for one."""
        parts: list[Node] = []
        for piece in re.split(r"([*?])", text):
            if piece == "*":
                parts.append(_Repeat(_ANY, 0, None))
            elif piece:
                parts.append(_ANY if piece == "?" else _Literal(piece))
        return cls._of(text, _Sequence((*parts, _Place("\\Z"))))

    @classmethod
    def _of(cls, text: str, root: Node) -> Pattern:
        parts = root.parts if isinstance(root, _Sequence) else ()
        literals = tuple(p.text for p in parts if isinstance(p, _Literal))
        prefix = literals[0] if literals and isinstance(parts[0], _Literal) else ""
        return cls(text, root, prefix, tuple(sorted(literals, key=len, reverse=True)))

    def matches(self, name: Name) -> bool:
        """Whether the name, or for an expression some beginning of it, is as the pattern says."""
        name.budget.spend(1 + len(self.needed) * name.cost)
        if not name.text.startswith(self.prefix) or not all(n in name.text for n in self.needed):
            return False
        return self.root.ends(name, 1) != 0


_ANY = _Char(re.compile(".", re.DOTALL))
_DOT = _Char(re.compile("."))
_WORD = re.compile(r"\w")


class _UnknownError(Exception):
    """A construct of `re` that is not read here."""


class _Reader:
    """Reads a pattern that `re` accepts."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def whole(self) -> Node:
        return self.either()

    def either(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise _UnknownError("nested too deeply")
        parts = [self.sequence()]
        while self.text[self.at : self.at + 1] == "|":
            self.at += 1
            parts.append(self.sequence())
        self.depth -= 1
        return parts[0] if len(parts) == 1 else _Either(tuple(parts))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            atom = self.atom()
            part = self.repeated(atom)
            if part is atom and isinstance(atom, _Literal) and parts and isinstance(parts[-1], _Literal):
                parts[-1] = _Literal(parts[-1].text + atom.text)
            else:
                parts.append(part)
        return _Sequence(tuple(parts))

    def repeated(self, part: Node) -> Node:
        found = _QUANTIFIER.match(self.text, self.at)
        if not found or found[1] == "{}":
            return part
        self.at = found.end()
        if found[5] == "+":
            raise _UnknownError("a possessive repeat")
        if found[1] in ("*", "+", "?"):
            return _Repeat(part, int(found[1] == "+"), 1 if found[1] == "?" else None)
        least = int(found[2] or 0)
        most = (int(found[4]) if found[4] else None) if found[3] else least
        if max(least, most or 0) > _MOST_REPEATS:
            raise _UnknownError(f"more than {_MOST_REPEATS} repeats")
        return _Repeat(part, least, most)

    def atom(self) -> Node:
        c = self.text[self.at]
        if c == "(":
            return self.group()
        if c == "[":
            found = _CLASS.match(self.text, self.at)
            assert found  # `re` accepts the pattern
            return self.char(found[0])
        if c == "\\":
            two = self.text[self.at : self.at + 2]
            if two in ("\\A", "\\Z", "\\b", "\\B"):
                self.at += 2
                return _Place(two)
            if not _ESCAPE.fullmatch(two):
                raise _UnknownError(f"the escape {two}")
            if not two[1].isalpha():
                self.at += 2
                return _Literal(two[1])
            return self.char(two)
        self.at += 1
        if c in "^$":
            return _Place(c)
        return _DOT if c == "." else _Literal(c)

    def char(self, text: str) -> Node:
        self.at += len(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a set that looks nested
            return _Char(re.compile(text))

    def group(self) -> Node:
        look = next((k for k in _LOOKS if self.text.startswith(k, self.at)), None)
        opening = look or re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))").match(self.text, self.at)
        if not opening:
            raise _UnknownError(f"the group {self.text[self.at : self.at + 4]}")
        self.at += len(opening if isinstance(opening, str) else opening[0])
        part = self.either()
        self.at += 1  # the closing parenthesis
        return _Look(part, *_LOOKS[look]) if look else part
