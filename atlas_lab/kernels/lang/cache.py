"""The disk cache of compiled kernels: one file a kernel, named by the digest of what the cubin is made from.

A file is a line of JSON (the digest of the rest, and the report's fields) and the cubin. A second, smaller kind of
file leads from a kernel's fingerprint to that digest, so that a known kernel is not lowered again. Files are written
under another name and renamed, so readers see whole ones; one that does not match its digest counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_SCHEMA = "atlas-lab.cubin/1"


def directory() -> Path:
    """$ATLAS_LAB_CACHE, or ~/.cache/atlas-lab."""
    found = os.environ.get("ATLAS_LAB_CACHE")
    return Path(found) if found else Path.home() / ".cache" / "atlas-lab"


def digest(*parts: str | bytes) -> str:
    """The SHA-256 of the parts, each with its length."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()


def _path(key: str) -> Path:
    return directory() / "cubin" / f"{key}.cubin"


def load(key: str) -> tuple[dict[str, Any], bytes] | None:
    """The report and the cubin stored under `key`; None if absent or damaged."""
    try:
        head, _, body = _path(key).read_bytes().partition(b"\n")
        header = json.loads(head)
        report = header["report"]
        if header["schema"] != _SCHEMA or header["digest"] != digest(json.dumps(report), body):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report, body


def store(key: str, report: Mapping[str, Any], cubin: bytes) -> None:
    """Keep a cubin; a directory that cannot be written is no error, the next process compiles again."""
    header = {"schema": _SCHEMA, "digest": digest(json.dumps(report), cubin), "report": report}
    _write(_path(key), json.dumps(header).encode() + b"\n" + cubin)


def lead(fingerprint: str, key: str) -> None:
    """Remember the key of a fingerprint."""
    _write(_lead(fingerprint), f"{key} {digest(fingerprint, key)}".encode())


def follow(fingerprint: str) -> str | None:
    """The key of a fingerprint; None if unknown or damaged."""
    try:
        key, _, check = _lead(fingerprint).read_text().partition(" ")
    except (OSError, ValueError):
        return None
    return key if check == digest(fingerprint, key) else None


def _lead(fingerprint: str) -> Path:
    return directory() / "cubin" / f"{fingerprint}.key"


def _write(path: Path, data: bytes) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        try:
            with os.fdopen(descriptor, "wb") as f:
                f.write(data)
            os.replace(name, path)
        except OSError:
            with suppress(OSError):
                os.unlink(name)
            raise
