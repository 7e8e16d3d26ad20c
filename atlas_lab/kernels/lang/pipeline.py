"""Numba-CUDA's passes as kernels need them: loops repeated first, constants folded, and no work done for nothing.

Kernels are long and straight, and Numba does many things once a pass, once a statement or once a call that they need
once or never. What is left out here changes no code. Imported only when something is compiled.
"""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, ModuleType
from typing import Any

from numba.cuda import cgutils, types
from numba.cuda.compiler import CUDACompiler, CUDANativeLowering
from numba.cuda.core import base, ir, ir_utils, postproc, transforms
from numba.cuda.core.analysis import compute_use_defs, must_use_alloca
from numba.cuda.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.cuda.core.errors import LoweringError, NumbaError, new_error_context
from numba.cuda.core.typed_passes import AnnotateTypes, NopythonRewrites
from numba.cuda.core.typeinfer import CallConstraint
from numba.cuda.core.untyped_passes import InlineClosureLikes, IRProcessing, ReconstructSSA
from numba.cuda.lowering import CUDALower
from numba.cuda.target import CUDATypingContext

from atlas_lab.kernels.lang.constants import FoldIntegers
from atlas_lab.kernels.lang.forloops import RangeLoops, UnrollLoops
from atlas_lab.kernels.lang.kernel import DeviceFunction
from atlas_lab.kernels.lang.op import Op


class _Passes(PassManager):  # type: ignore[misc]
    """Runs a pass and names it in errors; Numba's also times it, and prints arguments and flags for listeners."""

    def _runPass(self, index: int, pss: Any, internal_state: Any) -> None:  # noqa: N802 (Numba's name)
        pss.analysis = self._analysis
        with new_error_context(f"Pass {pss.name()}"):
            pss.run_pass(internal_state)


@register_pass(mutates_CFG=True, analysis_only=False)
class _InlineClosures(InlineClosureLikes):  # type: ignore[misc]
    """Only where a function defines one."""

    _name = "atlas_inline_closures"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        blocks = state.func_ir.blocks.values()
        if any(True for block in blocks for _ in block.find_exprs(op="make_function")):
            super().run_pass(state)
        return True


class _Lower(CUDALower):  # type: ignore[misc]
    def lower_block(self, block: Any) -> None:
        """Where a statement is, is told of the one that fails."""
        self.pre_block(block)
        for inst in block.body:
            self.loc = inst.loc
            try:
                self.lower_inst(inst)
            except NumbaError:
                where = functools.partial(LoweringError, loc=inst.loc)
                with new_error_context('lowering "{inst}" at {loc}', inst=inst, loc=inst.loc, errcls_=where):
                    raise
        self.post_block(block)

    def lower_inst(self, inst: Any) -> None:
        """Numba prints every statement for its debugger, and asks ten times what kind it is of."""
        kind = type(inst)
        if kind is ir.Assign and type(inst.value) is not ir.Arg:
            name = inst.target.name
            self.storevar(self.lower_assign(self.typeof(name), inst), name)
        elif kind is ir.Del:
            self.delvar(inst.value)
        else:
            super().lower_inst(inst)

    def alloca_lltype(self, name: str, lltype: Any, datamodel: Any = None) -> Any:
        """Without Numba's note of the variable's size for a debugger, which LLVM is asked for through a module."""
        return cgutils.alloca_once(self.builder, lltype, name=name)

    def _find_singly_assigned_variable(self) -> None:
        """Variables assigned once and used in that block alone need no memory; Numba reads the block anew for each."""
        used, defined = compute_use_defs(self.blocks)
        elsewhere = set().union(*used.values()) | must_use_alloca(self.blocks)
        assigned = Counter(s.target.name for b in self.blocks.values() for s in b.find_insts(ir.Assign))
        local = {name for names in defined.values() for name in names}
        self._singly_assigned_vars = {name for name in local - elsewhere if assigned[name] == 1}
        self._blk_local_varmap: dict[str, Any] = {}


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(CUDANativeLowering):  # type: ignore[misc]
    _name = "atlas_lowering"

    @property
    def lowering_class(self) -> type[_Lower]:
        return _Lower


# What stands for a pass of Numba's; nothing for rewrites after inference, which are of strings and of array literals,
# and for notes for people, which keep the function's IR in memory.
_INSTEAD: dict[Any, list[Any]] = {
    IRProcessing: [UnrollLoops, RangeLoops, IRProcessing],
    ReconstructSSA: [ReconstructSSA, FoldIntegers],
    InlineClosureLikes: [_InlineClosures],
    NopythonRewrites: [],
    AnnotateTypes: [],
    CUDANativeLowering: [_Lowering],
}


class Pipeline(CUDACompiler):  # type: ignore[misc]
    """The passes, in order."""

    def define_pipelines(self) -> list[Any]:
        passes = _Passes("atlas")
        for whole in super().define_pipelines():
            for implementation, description in whole.passes:
                for made in _INSTEAD.get(implementation, [implementation]):
                    passes.add_pass(made, description)
        passes.finalize()
        return [passes]


class _PostProcessor(postproc.PostProcessor):  # type: ignore[misc]
    """Lifetimes are found where statements that end them are asked for; Numba finds them after every pass too."""

    def run(self, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
        if emit_dels or self.func_ir.is_generator:
            super().run(emit_dels, extend_lifetimes)
        else:
            self.func_ir.blocks = transforms.canonicalize_cfg(self.func_ir.blocks)
            self.func_ir.generator_info = None


_TYPED: dict[Any, Any] = {}


def _call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
    """The signature of a call of one of Numba's functions: found once for the types of its arguments."""
    key = (self, context, args, tuple(kws.items()))
    if key not in _TYPED:
        _TYPED[key] = super(types.Function, self).get_call_type(context, args, kws)
    return _TYPED[key]


def _resolve(self: Any, typeinfer: Any, typevars: Any, fnty: Any) -> None:
    """Types a call again only if the types that it depends on are new: Numba repeats all until none of them is."""
    seen = (fnty, *(typevars[a.name].type for a in self.args)) if not self.kws and self.vararg is None else None
    if seen is not None and self.signature is not None and seen == self.__dict__.get("seen"):
        return
    _resolve_call(self, typeinfer, typevars, fnty)
    self.seen = seen


_resolve_call = CallConstraint.resolve

_VALUES: dict[Any, Any] = {}


def _value_type(self: Any, val: Any) -> Any:
    """The type of a value that is a constant, found once for those that are told apart by what they are."""
    if not isinstance(val, _NAMED):
        return _theirs(self, val)
    if val not in _VALUES:
        _VALUES[val] = _theirs(self, val)
    return _VALUES[val]


_NAMED = (Op, DeviceFunction, ModuleType, BuiltinFunctionType)
_theirs = CUDATypingContext.resolve_value_type

_has_loc = functools.cache(base._has_loc)


def _variables(self: Any, value: Any) -> list[Any]:
    """The variables in a part of a statement: by its exact type, as asking for abstract ones is slow."""
    kind = type(value)
    if kind is ir.Var:
        return [value]
    if kind is list or kind is tuple or kind is dict:
        parts = value.values() if kind is dict else value
        return [v for part in parts for v in _variables(self, part)]
    found: list[Any] = value.list_vars() if issubclass(kind, ir.Inst) else []
    return found


def _used(statement: Any) -> list[Any]:
    """The variables of a statement; Numba writes it anew to list them."""
    if type(statement) is ir.Del:
        return [ir.Var(None, statement.value, statement.loc)]
    found: list[Any] = statement.list_vars()
    return found


_QUICK = (
    (postproc, "PostProcessor", _PostProcessor),
    (base, "_has_loc", _has_loc),
    (CallConstraint, "resolve", _resolve),
    (CUDATypingContext, "resolve_value_type", _value_type),
    (ir.Inst, "_rec_list_vars", _variables),
    (ir_utils, "compat_list_vars_stmt", _used),
)


@contextmanager
def quick() -> Iterator[None]:
    """Within it, Numba's slowest parts are these; and nothing is searched for garbage: little of it is."""
    saved, collecting = [getattr(owner, name) for owner, name, _ in _QUICK], gc.isenabled()
    gc.disable()
    types.Function.get_call_type = _call_type
    for owner, name, ours in _QUICK:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for (owner, name, _), theirs in zip(_QUICK, saved, strict=True):
            setattr(owner, name, theirs)
        del types.Function.get_call_type
        if collecting:
            gc.enable()
