"""JSON as checkpoints use it: one object, read strictly, every fault one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from reprlib import Repr
from typing import Any, NoReturn

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 120


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as it is; one sentence with file, tensor or key, found and expected."""


def brief(value: object) -> str:
    """A value as found in a file, quoted, cut where it is long."""
    return "null" if value is None else _REPR.repr(value)


def shown(text: str) -> str:
    """A name from a file as part of a sentence: as it is, or quoted and cut where that would break the sentence."""
    return text if text.isprintable() and len(text) <= 200 else brief(text)


def refuse_endless(path: Path) -> None:
    """Raise CheckpointError for a pipe or a device, which a read might wait for, or never see the end of."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise CheckpointError(f"{path}: found a pipe or a device, expected a file")


def read_bytes(path: Path) -> bytes:
    """A whole file; raises CheckpointError where the system refuses."""
    refuse_endless(path)
    try:
        return path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None


def parse_object(data: bytes, label: str) -> dict[str, Any]:
    """The JSON object in `data`; raises CheckpointError for anything else, and for a key that occurs twice."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) < len(items):
            seen: set[str] = set()
            twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{label}: found key {brief(twice)} twice in one object, expected it once")
        return out

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{label}: found JSON nested too deeply, expected an object") from None
    except ValueError as e:
        raise CheckpointError(f"{label}: found no valid JSON ({e}), expected an object") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{label}: found {brief(value)}, expected a JSON object")
    return value


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer; `true` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    """Whether a JSON value is a string that UTF-8 can spell; `"\\ud800"`, half a surrogate pair, is none."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def is_text_map(value: object) -> bool:
    return isinstance(value, Mapping) and all(is_text(k) and is_text(v) for k, v in value.items())
