"""Atlas Lab: a laboratory for the GPU kernels that multiply by quantized LLM weights.

The names an author of arms needs are here; each is imported from its room when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "core.arm": ("Arm",),
    "core.call": ("Call", "Epilogue", "Operand"),
    "core.chip": ("Work", "ranked"),
    "core.context": ("Context", "ModelDims", "Order", "Pin", "Preferences"),
    "core.declare": ("Bind", "Derived"),
    "core.hookspecs": ("hookimpl",),
    "core.launch": ("Launch", "Program"),
    "core.levers": ("Levers",),
    "core.library": ("LibraryCall", "LibraryLaunch"),
    "core.numbers": ("Accuracy", "Exact", "ReductionClass", "Rounded"),
    "core.projection": ("Projection", "Site", "WeightSource"),
    "core.registry": ("load_registry",),
    "core.resolve": ("resolve",),
    "core.rows": ("Rows", "rows", "rows_from"),
    "core.target": ("Target",),
    "core.tensor": ("Tensor",),
    "core.tensor_map": ("TensorMap",),
    "core.tuning": ("Setting", "chosen", "setting"),
    "core.verdict": ("Verdict", "no", "yes"),
}
_HOME = {name: f"atlas_lab.{module}" for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from atlas_lab.core.arm import Arm as Arm
    from atlas_lab.core.call import Call as Call
    from atlas_lab.core.call import Epilogue as Epilogue
    from atlas_lab.core.call import Operand as Operand
    from atlas_lab.core.chip import Work as Work
    from atlas_lab.core.chip import ranked as ranked
    from atlas_lab.core.context import Context as Context
    from atlas_lab.core.context import ModelDims as ModelDims
    from atlas_lab.core.context import Order as Order
    from atlas_lab.core.context import Pin as Pin
    from atlas_lab.core.context import Preferences as Preferences
    from atlas_lab.core.declare import Bind as Bind
    from atlas_lab.core.declare import Derived as Derived
    from atlas_lab.core.hookspecs import hookimpl as hookimpl
    from atlas_lab.core.launch import Launch as Launch
    from atlas_lab.core.launch import Program as Program
    from atlas_lab.core.levers import Levers as Levers
    from atlas_lab.core.library import LibraryCall as LibraryCall
    from atlas_lab.core.library import LibraryLaunch as LibraryLaunch
    from atlas_lab.core.numbers import Accuracy as Accuracy
    from atlas_lab.core.numbers import Exact as Exact
    from atlas_lab.core.numbers import ReductionClass as ReductionClass
    from atlas_lab.core.numbers import Rounded as Rounded
    from atlas_lab.core.projection import Projection as Projection
    from atlas_lab.core.projection import Site as Site
    from atlas_lab.core.projection import WeightSource as WeightSource
    from atlas_lab.core.registry import load_registry as load_registry
    from atlas_lab.core.resolve import resolve as resolve
    from atlas_lab.core.rows import Rows as Rows
    from atlas_lab.core.rows import rows as rows
    from atlas_lab.core.rows import rows_from as rows_from
    from atlas_lab.core.target import Target as Target
    from atlas_lab.core.tensor import Tensor as Tensor
    from atlas_lab.core.tensor_map import TensorMap as TensorMap
    from atlas_lab.core.tuning import Setting as Setting
    from atlas_lab.core.tuning import chosen as chosen
    from atlas_lab.core.tuning import setting as setting
    from atlas_lab.core.verdict import Verdict as Verdict
    from atlas_lab.core.verdict import no as no
    from atlas_lab.core.verdict import yes as yes


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'atlas_lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
