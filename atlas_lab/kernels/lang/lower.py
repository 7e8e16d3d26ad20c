"""Typing and lowering of the language's objects in Numba-CUDA. Imported only when something is compiled."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cuda as numba_cuda
from numba.core.errors import TypingError
from numba.cuda import types
from numba.cuda.compiler import compile_cuda
from numba.cuda.datamodel.models import PrimitiveModel
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.extending import _Intrinsic, typeof_impl
from numba.cuda.models import register_model

from atlas_lab.kernels.lang import types as lang
from atlas_lab.kernels.lang.kernel import DeviceFunction, KernelError, Parameter
from atlas_lab.kernels.lang.op import Const, Effect, Op, Operand, Ptr, Vec
from atlas_lab.kernels.lang.proxy import CudaProxy

_LLVM = {"int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64}
_CONSTRAINT = {16: "h", 32: "r", 64: "l"}
_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


class PointerType(types.Type):  # type: ignore[misc]
    """A typed address: 64 bits wide in global memory, 32 in shared memory."""

    def __init__(self, dtype: lang.Scalar, space: str, mode: str) -> None:
        self.dtype, self.space, self.mode = dtype, space, mode
        super().__init__(name=f"{space} {mode} pointer to {dtype}")


@register_model(PointerType)
class _PointerModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: PointerType) -> None:
        super().__init__(dmm, fe_type, _I64 if fe_type.space == "global" else _I32)


class StorageType(types.Type):  # type: ignore[misc]
    """The type of a storage element type named in a kernel, such as `L.bf16` in `L.shared(L.bf16, 64)`."""

    def __init__(self, dtype: lang.Scalar) -> None:
        self.dtype = dtype
        super().__init__(name=f"element type {dtype}")


@register_model(StorageType)
class _StorageModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: StorageType) -> None:
        super().__init__(dmm, fe_type, ir.IntType(8))


def numba_type(scalar: lang.Scalar) -> Any:
    return getattr(types, scalar.numba)


def parameter_type(p: Parameter) -> Any:
    """The Numba type of a kernel parameter."""
    if p.abi == "pointer":
        return PointerType(p.dtype, "global", p.mode)
    if p.abi == "array":
        return types.Array(numba_type(p.dtype), 1, "C")
    return numba_type(p.dtype)


def _llvm(scalar: lang.Scalar) -> ir.Type:
    return ir.FloatType() if scalar.numba == "float32" else ir.IntType(_LLVM[scalar.numba])


def _constraint(scalar: lang.Scalar) -> str:
    return "f" if scalar.numba == "float32" else _CONSTRAINT[scalar.bits]


def _typed(op: Op, spec: Operand, actual: tuple[Any, ...], at: int) -> tuple[list[Any], int]:
    """Signature types of one operand spec and how many actual arguments it takes."""
    if isinstance(spec, Ptr):
        p = actual[at]
        if not isinstance(p, PointerType) or p.space not in spec.spaces or p.mode not in spec.modes:
            raise TypingError(
                f"{op.name}: found {p} as operand {at}, expected a {' or '.join(spec.spaces)} pointer declared "
                f"{' or '.join(spec.modes)}"
            )
        return [p, types.int64 if p.space == "global" else types.int32], 2
    if isinstance(spec, Vec):
        return [types.UniTuple(numba_type(spec.dtype), spec.count)], 1
    if isinstance(spec, Const):
        if not isinstance(actual[at], types.IntegerLiteral):
            raise TypingError(f"{op.name}: operand {spec.name!r} must be known at compile time, found {actual[at]}")
        return [actual[at]], 1
    return [numba_type(spec)], 1


class Emitter:
    """What a lowering function gets: the builder and the instructions several lowerings share."""

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Any) -> None:
        self.context, self.builder, self.signature = context, builder, signature

    def asm(self, text: str, result: ir.Type | None, constraints: str, args: list[Any], *, effect: Effect) -> Any:
        """One inline-asm call; anything not pure is ordered against memory."""
        pure = effect is Effect.PURE
        constraints = constraints if pure else ",".join(filter(None, (constraints, "~{memory}")))
        function = ir.FunctionType(result or ir.VoidType(), [a.type for a in args])
        return self.builder.call(ir.InlineAsm(function, text, constraints, side_effect=not pure), args)

    def tuple(self, values: list[Any], scalar: lang.Scalar) -> Any:
        out = ir.Constant(ir.ArrayType(_llvm(scalar), len(values)), ir.Undefined)
        for i, v in enumerate(values):
            out = self.builder.insert_value(out, v, i)
        return out

    def elements(self, value: Any, count: int) -> list[Any]:
        return [self.builder.extract_value(value, i) for i in range(count)]

    def address(self, pointer: Any, index: Any, kind: PointerType) -> Any:
        width = _I64 if kind.space == "global" else _I32
        return self.builder.add(pointer, self.builder.mul(index, ir.Constant(width, kind.dtype.bytes)))


def _flatten(op: Op, e: Emitter, args: list[Any]) -> tuple[list[Any], list[str], dict[str, int], set[int]]:
    """LLVM registers of the operands, their constraints, compile-time values, and the tied registers."""
    values: list[Any] = []
    constraints: list[str] = []
    consts: dict[str, int] = {}
    tied: set[int] = set()
    at = 0
    for position, spec in enumerate(op.operands):
        kind = e.signature.args[at]
        first = len(values)
        if isinstance(spec, Ptr):
            values.append(e.address(args[at], args[at + 1], kind))
            constraints.append("l" if kind.space == "global" else "r")
            at += 2
        elif isinstance(spec, Vec):
            values += e.elements(args[at], spec.count)
            constraints += [_constraint(spec.dtype)] * spec.count
            at += 1
        elif isinstance(spec, Const):
            consts[spec.name] = kind.literal_value
            at += 1
        else:
            values.append(args[at])
            constraints.append(_constraint(spec))
            at += 1
        if position in op.tied:
            tied |= set(range(first, len(values)))
    return values, constraints, consts, tied


def _lower(op: Op, context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
    e = Emitter(context, builder, signature)
    values, constraints, consts, tied = _flatten(op, e, args)
    result = op.result
    if callable(op.ptx):
        out = op.ptx(e, *values, **consts)
        if isinstance(result, Vec):
            return e.tuple(out, result.dtype)
        return context.get_dummy_value() if result is None else out
    order = iter(range(len(values)))
    constraints = [str(next(order)) if i in tied else c for i, c in enumerate(constraints)]
    text = op.ptx
    for name, value in consts.items():
        text = text.replace("{" + name + "}", str(value))
    if result is None:
        e.asm(text, None, ",".join(constraints), values, effect=op.effect)
        return context.get_dummy_value()
    if isinstance(result, Vec) and result.count > 1:
        scalar = result.dtype
        outputs = ["=" + _constraint(scalar)] * result.count
        kind: ir.Type = ir.LiteralStructType([_llvm(scalar)] * result.count)
        struct = e.asm(text, kind, ",".join(outputs + constraints), values, effect=op.effect)
        return e.tuple(e.elements(struct, result.count), scalar)
    scalar = result.dtype if isinstance(result, Vec) else result
    value = e.asm(text, _llvm(scalar), ",".join(["=" + _constraint(scalar), *constraints]), values, effect=op.effect)
    return e.tuple([value], scalar) if isinstance(result, Vec) else value


def _result_type(op: Op) -> Any:
    if op.result is None:
        return types.none
    if isinstance(op.result, Vec):
        return types.UniTuple(numba_type(op.result.dtype), op.result.count)
    return numba_type(op.result)


def _type(op: Op, actual: tuple[Any, ...]) -> Any:
    wanted: list[Any] = []
    at = 0
    for spec in op.operands:
        if at >= len(actual):
            raise TypingError(f"{op.name}: found {len(actual)} arguments, expected more")
        kinds, taken = _typed(op, spec, actual, at)
        wanted += kinds
        at += taken
    if at != len(actual):
        raise TypingError(f"{op.name}: found {len(actual)} arguments, expected {at}")
    return _result_type(op)(*wanted)


_INTRINSICS: dict[Op, Any] = {}


def as_intrinsic(op: Op) -> Any:
    """The Numba intrinsic of an Op, made once."""
    if op not in _INTRINSICS:
        arity = sum(2 if isinstance(s, Ptr) else 1 for s in op.operands)
        names = ", ".join(f"a{i}" for i in range(arity))
        scope: dict[str, Any] = {
            "resolve": lambda *actual: (_type(op, actual), lambda c, b, s, a: _lower(op, c, b, s, a)),
        }
        exec(f"def {op.name}(typingctx, {names}):\n    return resolve({names})\n", scope)  # noqa: S102
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


@typeof_impl.register(Op)
def _typeof_op(value: Op, c: Any) -> Any:
    return cuda_target.typing_context.resolve_value_type(as_intrinsic(value))


@typeof_impl.register(DeviceFunction)
def _typeof_device(value: DeviceFunction, c: Any) -> Any:
    return cuda_target.typing_context.resolve_value_type(as_device(value))


@typeof_impl.register(lang.Scalar)
def _typeof_scalar(value: lang.Scalar, c: Any) -> Any:
    return types.NumberClass(numba_type(value)) if value.numba else StorageType(value)


@typeof_impl.register(CudaProxy)
def _typeof_proxy(value: CudaProxy, c: Any) -> Any:
    return types.Module(numba_cuda)


__all__ = ["Emitter", "KernelError", "PointerType", "as_device", "as_intrinsic", "numba_type", "parameter_type"]
