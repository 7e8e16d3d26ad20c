"""`doctor`: what is here, what is not, and how to get it."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from atlas_lab.cli.common import DONE, SAYS_NO, Common, app, verb
from atlas_lab.core.registry import Registry, load_registry
from atlas_lab.core.tuned_file import shipped_table
from atlas_lab.core.tuning import TuningError, faults
from atlas_lab.experiments import config
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.report import row, table
from atlas_lab.experiments.settings import check_names, registry_for
from atlas_lab.kernels.lang import cache
from atlas_lab.kernels.lang.compile import compiler_missing
from atlas_lab.runtime import cublaslt
from atlas_lab.runtime.driver import missing_gpu

Row = tuple[str, str, str]
"""What was looked at; `ok`, `missing` (something is not there, the rest works) or `fault`; the sentence."""


@verb(app, "doctor")
def doctor(common: Common) -> int:
    """Look at everything a run needs. Exit status 1 where something is broken, not where it is merely absent."""
    rows: list[Row] = []
    for look in (_python, _numpy, _numba, _compiler, _gpu, _library, _cache):
        rows.append(look())
    rows += _settings(common)
    t = table("what", "", "found")
    for what, state, found in rows:
        row(t, what, state, found, style="red" if state == "fault" else "")
    common.console.print(t)
    answer = [{"what": w, "state": s, "found": f} for w, s, f in rows]
    common.give(json.dumps({"schema": "atlas-lab.doctor/1", "rows": answer}, indent=1) + "\n")
    return SAYS_NO if any(state == "fault" for _, state, _ in rows) else DONE


def _python() -> Row:
    ok = sys.version_info >= (3, 11)
    return (
        "python",
        "ok" if ok else "fault",
        f"{platform.python_version()}" + ("" if ok else ", expected 3.11 or later"),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numpy() -> Row:
    import numpy as np

    major, minor = (int(x) for x in np.__version__.split(".")[:2])
    ok = (2, 0) <= (major, minor) < (2, 5)
    wanted = "" if ok else ", expected 2.0 or later, before 2.5: numba-cuda 0.30 does not import under it"
    return ("numpy", "ok" if ok else "fault", np.__version__ + wanted)


def _numba() -> Row:
    """numba-cuda replaces `numba.cuda` by a redirector; without it kernels compile through another package."""
    version = _version("numba-cuda")
    if version is None:
        return ("numba-cuda", "missing", "not installed: nothing is compiled, the interpreter runs")
    try:
        from numba import cuda

        file = os.fspath(cuda.__file__ or "")
    except Exception as e:  # whatever breaks the import is what we are here to say
        return ("numba-cuda", "fault", f"{version} does not import: {type(e).__name__}: {e}")
    if "numba_cuda" not in file:
        return ("numba-cuda", "fault", f"{version}, but numba.cuda is {file}, expected numba-cuda's")
    return ("numba-cuda", "ok", f"{version}, numba {_version('numba')}; numba.cuda is redirected to it")


def _compiler() -> Row:
    missing = compiler_missing()
    if missing:
        return ("CUDA compiler", "missing", missing)
    return ("CUDA compiler", "ok", f"nvJitLink {_version('nvidia-nvjitlink') or 'of the system'}")


def _gpu() -> Row:
    missing = missing_gpu()
    if missing:
        return ("GPU", "missing", missing)
    from atlas_lab.runtime.card import card_of

    card = card_of(0)
    major, minor = card.capability
    return ("GPU", "ok", f"{card.name}, compute capability {major}.{minor}, driver for CUDA {card.cuda}")


def _library() -> Row:
    """The extra `library`; without a GPU its packages alone, for nothing of it loads."""
    packages = {p: _version(p) for p in ("nvmath-python", "nvidia-cublas")}
    installed = ", ".join(f"{p} {version}" for p, version in packages.items() if version)
    missing = cublaslt.missing()
    if not missing:
        return ("cuBLASLt", "ok", f"{cublaslt.version()}, {installed}")
    if packages["nvmath-python"] and missing_gpu():
        return ("cuBLASLt", "missing", f"{installed}; it loads where there is a GPU, the interpreter needs none of it")
    return ("cuBLASLt", "missing", missing)


def _cache() -> Row:
    folder = cache.directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    except OSError as e:
        return ("cache", "fault", f"{folder}: {e.strerror}")
    if not os.access(folder, os.W_OK):
        return ("cache", "fault", f"{folder} cannot be written; set ATLAS_LAB_CACHE to a folder that can")
    return ("cache", "ok", f"{folder}, {size / 1e6:.1f} MB")


def _tables(registry: Registry) -> list[Row]:
    """The tuned table of every target that has one, and each choice in it that no arm can run with."""
    rows: list[Row] = []
    for t in registry.targets.values():
        what = f"tuned table {t.name}"
        try:
            table = shipped_table(t.name)
        except TuningError as e:
            rows.append((what, "fault", str(e)))
            continue
        wrong = faults(table, [e.arm for e in registry.entries], t)
        rows += [(what, "fault", sentence) for sentence in wrong]
        if table.choices and not wrong:
            rows.append((what, "ok", f"{len(table.choices)} settings, all of which their arms know"))
    return rows or [("tuned tables", "missing", "none: arms run with the chip model's first setting")]


def _settings(common: Common) -> list[Row]:
    """The settings file, what is installed, and every plugin that failed."""
    rows: list[Row] = []
    registry = load_registry()
    held: list[Callable[[], Any]] = []
    try:
        loaded = config.load(common.config)
        rows.append(("settings", "ok", f"{loaded.source.path} ({loaded.how})"))
        held = [lambda: registry_for(loaded, common.plugins), lambda: check_names(loaded, registry_for(loaded))]
    except ConfigError as e:
        rows.append(("settings", "fault", str(e)))
    for step in held:
        try:
            made = step()
            registry = made or registry
        except ConfigError as e:
            rows.append(("settings", "fault", str(e)))
            break
    rows += _tables(registry)
    rows.append(("arms", "ok", ", ".join(e.arm.name for e in registry.entries) or "none"))
    for f in registry.faults:
        origin = f"{f.plugin.distribution} {f.plugin.version}".strip() or f.plugin.where
        rows.append((f"plugin {f.plugin.name}", "fault", f"{origin}: {f.sentence}"))
    return rows
