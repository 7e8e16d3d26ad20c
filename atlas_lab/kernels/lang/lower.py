"""Typing and lowering of the language's objects in Numba-CUDA. Imported only when something is compiled."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cuda as numba_cuda
from numba.core.errors import TypingError
from numba.cuda import types
from numba.cuda.compiler import compile_cuda
from numba.cuda.datamodel.models import OpaqueModel, PrimitiveModel
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.extending import _Intrinsic, typeof_impl
from numba.cuda.models import register_model

from atlas_lab.kernels.lang import types as lang
from atlas_lab.kernels.lang.emit import Emitter, address_type, llvm_type
from atlas_lab.kernels.lang.kernel import DeviceFunction
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


class StorageType(types.Opaque):  # type: ignore[misc]
    """The type of a storage element type named in a kernel, such as `L.bf16` in `L.shared(L.bf16, 64)`."""

    def __init__(self, dtype: lang.Scalar) -> None:
        self.dtype = dtype
        super().__init__(name=f"element type {dtype}")


register_model(StorageType)(OpaqueModel)

_ARITHMETIC = {s.numba: s for s in lang.SCALARS.values() if s.numba}


def numba_type(scalar: lang.Scalar) -> Any:
    """The Numba type of values of an element type that has arithmetic."""
    return getattr(types, scalar.numba)


def parameter_type(p: lang.Parameter) -> Any:
    """The Numba type of a kernel parameter."""
    if p.abi == "pointer":
        return PointerType(PtrTo(p.dtype, "global", p.mode))
    if p.abi == "array":
        return types.Array(numba_type(p.dtype), 1, "C")
    return numba_type(p.dtype)


def _dtype(actual: Any) -> lang.Scalar | None:
    if isinstance(actual, StorageType):
        return actual.dtype
    return _ARITHMETIC.get(str(actual.dtype)) if isinstance(actual, types.NumberClass) else None


def _operand(op: Op, spec: Operand, actual: Any, at: int) -> tuple[list[Any], Any]:
    """Signature types of one operand, and what is known of it at compile time (None: nothing)."""
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


def _lower(op: Op, result: Result, known: list[Any], context: Any, builder: ir.IRBuilder, args: list[Any]) -> Any:
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


def _registers(
    op: Op, known: list[Any], emit: Emitter, args: list[Any]
) -> tuple[list[Any], dict[str, Any], list[int]]:
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


_INTRINSICS: dict[Op, Any] = {}


def as_intrinsic(op: Op) -> Any:
    """The Numba intrinsic of an Op, made once."""
    if op not in _INTRINSICS:

        def resolve(*actual: Any) -> Any:
            signature, result, known = _type(op, actual)
            return signature, lambda context, builder, sig, args: _lower(op, result, known, context, builder, args)

        # Numba reads the parameters of the function it is given, so it needs one with the right number of them.
        names = ", ".join(f"a{i}" for i in range(_arity(op)))
        scope: dict[str, Any] = {"resolve": resolve}
        exec(f"def {op.name}(typingctx, {names}):\n    return resolve({names})\n", scope)
        literal = any(isinstance(s, Const) for s in op.operands)
        made = _Intrinsic(op.name, scope[op.name], prefer_literal=literal, target="cuda")
        made._register()
        _INTRINSICS[op] = made
        cuda_target.typing_context.refresh()
    return _INTRINSICS[op]


class _DeviceDispatcher(CUDADispatcher):  # type: ignore[misc]
    """A device function compiled without asking a driver for the architecture: Numba's own dispatcher needs one."""

    def compile_device(self, args: Any, return_type: Any = None) -> Any:
        if args not in self.overloads:
            made = compile_cuda(
                self.py_func, return_type, args, forceinline=True, fastmath=False,
                nvvm_options={"opt": 3, "fastmath": False}, cc=(8, 0),
            )
            self.overloads[args] = made
            made.target_context.insert_user_function(made.entry_point, made.fndesc, [made.library])
        return self.overloads[args]


_DEVICE: dict[DeviceFunction, Any] = {}


def as_device(function: DeviceFunction) -> Any:
    """The Numba device dispatcher of a device function, made once."""
    if function not in _DEVICE:
        _DEVICE[function] = _DeviceDispatcher(function.function, {"device": True, "forceinline": True})
    return _DEVICE[function]


@typeof_impl.register(Op)  # type: ignore[untyped-decorator]
def _typeof_op(value: Op, c: Any) -> Any:
    return cuda_target.typing_context.resolve_value_type(as_intrinsic(value))


@typeof_impl.register(DeviceFunction)  # type: ignore[untyped-decorator]
def _typeof_device(value: DeviceFunction, c: Any) -> Any:
    return cuda_target.typing_context.resolve_value_type(as_device(value))


@typeof_impl.register(lang.Scalar)  # type: ignore[untyped-decorator]
def _typeof_scalar(value: lang.Scalar, c: Any) -> Any:
    return types.NumberClass(numba_type(value)) if value.numba else StorageType(value)


@typeof_impl.register(CudaProxy)  # type: ignore[untyped-decorator]
def _typeof_proxy(value: CudaProxy, c: Any) -> Any:
    return types.Module(numba_cuda)


__all__ = ["PointerType", "StorageType", "as_device", "as_intrinsic", "numba_type", "parameter_type"]
