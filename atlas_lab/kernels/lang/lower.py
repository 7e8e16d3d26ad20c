"""Typing and lowering of the language's objects in Numba-CUDA. Imported only when something is compiled."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import cuda as numba_cuda
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.datamodel.models import OpaqueModel, PrimitiveModel
from numba.cuda.descriptor import cuda_target
from numba.cuda.extending import typeof_impl
from numba.cuda.models import register_model

from atlas_lab.kernels.lang import types as lang
from atlas_lab.kernels.lang.emit import Emitter, address_type, llvm_type
from atlas_lab.kernels.lang.op import Const, Dtype, Op, Operand, Ptr, PtrTo, Result, Vec
from atlas_lab.kernels.lang.proxy import CudaProxy


class PointerType(types.Type):  # type: ignore[misc]
    """A typed address: 64 bits wide in global memory, 32 in shared memory."""

    def __init__(self, to: PtrTo) -> None:
        self.to = to
        super().__init__(name=f"{to.space} {to.mode} pointer to {to.dtype}")


@register_model(PointerType)
class _PointerModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: PointerType) -> None:
        super().__init__(dmm, fe_type, address_type(fe_type.to.space))


class StorageType(types.Callable, types.Opaque):  # type: ignore[misc]
    """The type of a storage element type named in a kernel, such as `L.bf16` in `L.shared(L.bf16, 64)`."""

    def __init__(self, dtype: lang.Scalar) -> None:
        self.dtype = dtype
        super().__init__(name=f"element type {dtype}")

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        raise TypingError(f"{self.dtype} is a storage type: convert with an intrinsic, not with {self.dtype}(...)")

    def get_impl_key(self, sig: Any) -> Any:
        return None

    def get_call_signatures(self) -> tuple[list[Any], bool]:
        return [], False


register_model(StorageType)(OpaqueModel)


class OpType(types.Callable, types.Opaque):  # type: ignore[misc]
    """The type of an intrinsic: typed and lowered by the op's description."""

    def __init__(self, op: Op) -> None:
        self.op = op
        super().__init__(name=f"intrinsic {op.name}")
        if op not in _LOWERED:
            _LOWERED.add(op)
            implementation = functools.partial(_lower, op)
            cuda_target.target_context.insert_func_defn([(implementation, op, (types.VarArg(types.Any),))])

    @property
    def key(self) -> Op:
        return self.op

    def get_call_type(self, context: Any, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        if kws:
            raise TypingError(f"{self.op.name}: arguments are positional, found {', '.join(kws)}")
        return _type(self.op, args)[0]

    def get_impl_key(self, sig: Any) -> Op:
        return self.op

    def get_call_signatures(self) -> tuple[list[Any], bool]:
        return [], True


register_model(OpType)(OpaqueModel)

_LOWERED: set[Op] = set()
_ARITHMETIC = {s.numba: s for s in lang.SCALARS.values() if s.numba}


def numba_type(scalar: lang.Scalar) -> Any:
    """The Numba type of values of an element type that has arithmetic."""
    return getattr(types, scalar.numba)


def parameter_type(p: lang.Parameter) -> Any:
    """The Numba type of a kernel parameter."""
    if p.abi == "pointer":
        return PointerType(PtrTo(p.dtype, "global", p.mode))
    if p.abi == "map":
        return PointerType(PtrTo(p.dtype, "map", p.mode))
    if p.abi == "array":
        return types.Array(numba_type(p.dtype), 1, "C")
    return numba_type(p.dtype)


def _dtype(actual: Any) -> lang.Scalar | None:
    if isinstance(actual, StorageType):
        return actual.dtype
    return _ARITHMETIC.get(str(actual.dtype)) if isinstance(actual, types.NumberClass) else None


def _operand(op: Op, spec: Operand, actual: Any, at: int) -> tuple[list[Any], Any]:
    """Signature types of one operand, and what is known of it at compile time (None: nothing)."""
    if not isinstance(spec, Const):
        actual = types.unliteral(actual)
    if isinstance(spec, Ptr):
        to = actual.to if isinstance(actual, PointerType) else None
        if to is None or to.space not in spec.spaces or to.mode not in spec.modes:
            raise TypingError(
                f"{op.name}: found {actual} as argument {at + 1}, expected a {' or '.join(spec.spaces)} pointer "
                f"declared {' or '.join(spec.modes)}"
            )
        index = [types.int64 if to.space == "global" else types.int32] if spec.indexed else []
        return [actual, *index], to
    if isinstance(spec, Const):
        if not isinstance(actual, types.IntegerLiteral):
            raise TypingError(f"{op.name}: argument {spec.name!r} must be known at compile time, found {actual}")
        return [actual], actual.literal_value
    if isinstance(spec, Dtype):
        dtype = _dtype(actual)
        if dtype is None:
            raise TypingError(f"{op.name}: argument {spec.name!r} must be an element type, found {actual}")
        return [actual], dtype
    wanted = types.UniTuple(numba_type(spec.dtype), spec.count) if isinstance(spec, Vec) else numba_type(spec)
    _convertible(op, spec, actual, at)
    return [wanted], None


def _convertible(op: Op, spec: Operand, actual: Any, at: int) -> None:
    if isinstance(spec, Vec):
        fits = isinstance(actual, types.BaseTuple) and len(actual) == spec.count
        fits = fits and all(isinstance(t, types.Number | types.Boolean) for t in actual)
        expected = f"a tuple of {spec.count} {spec.dtype}"
    else:
        fits = isinstance(actual, types.Number | types.Boolean)
        if isinstance(spec, lang.Scalar) and not isinstance(spec, lang.FloatScalar):
            fits = fits and not isinstance(actual, types.Float)
        expected = str(spec)
    if not fits:
        raise TypingError(f"{op.name}: found {actual} as argument {at + 1}, expected {expected}")


def _type(op: Op, actual: tuple[Any, ...]) -> tuple[Any, Result, list[Any]]:
    """Numba signature, the result's description, and what each operand is known to be."""
    wanted: list[Any] = []
    known: list[Any] = []
    for spec in op.operands:
        if len(wanted) >= len(actual):
            break
        kinds, fact = _operand(op, spec, actual[len(wanted)], len(wanted))
        wanted += kinds
        known.append(fact)
    if len(known) != len(op.operands) or len(wanted) != len(actual):
        raise TypingError(f"{op.name}: found {len(actual)} arguments, expected {_arity(op)}")
    result: Any = op.result
    if op.infers:
        result = result(*(fact for fact in known if fact is not None))
    return _result_type(result)(*wanted), result, known


def _result_type(result: Result) -> Any:
    if result is None:
        return types.none
    if isinstance(result, Vec):
        return types.UniTuple(numba_type(result.dtype), result.count)
    return PointerType(result) if isinstance(result, PtrTo) else numba_type(result)


def _lower(op: Op, context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
    _, result, known = _type(op, signature.args)
    emit = Emitter(context, builder, op, [k for k in known if isinstance(k, PtrTo)])
    values, consts, tied = _registers(op, known, emit, args)
    if not isinstance(op.ptx, str):
        out = op.ptx(emit, *values, **consts)
    else:
        text = op.ptx.replace("{space}", emit.pointers[0].space) if emit.pointers else op.ptx
        for name, value in consts.items():
            text = text.replace("{" + name + "}", str(value))
        kinds: list[Any] = []
        if isinstance(result, Vec):
            kinds = [llvm_type(result.dtype)] * result.count
        elif isinstance(result, lang.Scalar):
            kinds = [llvm_type(result)]
        out = emit.asm(text, kinds, values, tied)
        out = out[0] if isinstance(result, lang.Scalar) else out
    if result is None:
        return context.get_dummy_value()
    return emit.tuple(out) if isinstance(result, Vec) else out


def _registers(op: Op, known: list[Any], emit: Emitter, args: list[Any]) -> tuple[list[Any], dict[str, Any], list[int]]:
    """LLVM registers of the operands, compile-time operands by name, and which registers are tied."""
    values: list[Any] = []
    consts: dict[str, Any] = {}
    tied: list[int] = []
    rest = iter(args)
    for position, (spec, fact) in enumerate(zip(op.operands, known, strict=True)):
        arg = next(rest)
        first = len(values)
        if isinstance(spec, Ptr):
            if spec.indexed:
                step = emit.const(fact.dtype.bytes, address_type(fact.space))
                arg = emit.builder.add(arg, emit.builder.mul(next(rest), step))
            values.append(arg)
        elif isinstance(spec, Vec):
            values += emit.elements(arg, spec.count)
        elif isinstance(spec, Const | Dtype):
            consts[spec.name] = fact
        else:
            values.append(arg)
        if position in op.tied:
            tied += range(first, len(values))
    return values, consts, tied


def _arity(op: Op) -> int:
    return sum(2 if isinstance(s, Ptr) and s.indexed else 1 for s in op.operands)


@typeof_impl.register(Op)  # type: ignore[untyped-decorator]
def _typeof_op(value: Op, c: Any) -> Any:
    return OpType(value)


@typeof_impl.register(lang.Scalar)  # type: ignore[untyped-decorator]
def _typeof_scalar(value: lang.Scalar, c: Any) -> Any:
    return types.NumberClass(numba_type(value)) if value.numba else StorageType(value)


@typeof_impl.register(CudaProxy)  # type: ignore[untyped-decorator]
def _typeof_proxy(value: CudaProxy, c: Any) -> Any:
    return types.Module(numba_cuda)


__all__ = ["OpType", "PointerType", "StorageType", "numba_type", "parameter_type"]
