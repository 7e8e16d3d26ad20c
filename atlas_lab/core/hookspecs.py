"""What a plugin may implement. Mark the functions with `atlas_lab.hookimpl`; all of them are optional."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from atlas_lab.core.arm import Arm
    from atlas_lab.core.target import Target
    from atlas_lab.formats.base import Format

PROJECT = "atlas_lab"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec  # type: ignore[untyped-decorator]
def atlas_arms() -> Iterable[Arm]:  # type: ignore[empty-body]
    """Arms this plugin adds: instances of `Arm` with names nobody else uses."""


@hookspec  # type: ignore[untyped-decorator]
def atlas_formats() -> Iterable[Format]:  # type: ignore[empty-body]
    """Weight formats this plugin adds."""


@hookspec  # type: ignore[untyped-decorator]
def atlas_models() -> Iterable[Any]:  # type: ignore[empty-body]
    """Model families this plugin adds: objects as `atlas_lab.checkpoint.ModelFamily` says."""


@hookspec  # type: ignore[untyped-decorator]
def atlas_targets() -> Iterable[Target]:  # type: ignore[empty-body]
    """Cards this plugin adds."""
