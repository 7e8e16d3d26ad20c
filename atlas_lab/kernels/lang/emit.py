"""What a lowering function gets: LLVM types of the language's values, inline assembly, addresses, tuples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from atlas_lab.kernels.lang import types as lang
from atlas_lab.kernels.lang.op import Effect, Op, PtrTo

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
_CONSTRAINT = {16: "h", 32: "r", 64: "l"}


def llvm_type(scalar: lang.Scalar) -> ir.Type:
    """The register type of an element type that has arithmetic."""
    return F32 if scalar.numba == "float32" else ir.IntType(scalar.bits)


def address_type(space: str) -> ir.IntType:
    """Addresses are integers: 64 bits wide of global memory and tensor maps, 32 of shared memory and a cluster's."""
    return I64 if space in ("global", "map") else I32


def _constraint(kind: ir.Type) -> str:
    return "f" if kind == F32 else _CONSTRAINT[kind.width]


class Emitter:
    """The builder, the op and its operands' types, and the instructions that several lowerings share."""

    def __init__(self, context: Any, builder: ir.IRBuilder, op: Op, pointers: Sequence[PtrTo]) -> None:
        self.context, self.builder, self.op, self.pointers = context, builder, op, pointers

    def asm(self, text: str, results: Sequence[ir.Type], args: Sequence[Any], tied: Sequence[int] = ()) -> list[Any]:
        """One inline-asm call, with the op's effect: `$0…` are the results, then the arguments; arguments in
        `tied` (by position, in the order of the results) share registers with the results."""
        order = iter(range(len(tied)))
        inputs = [str(next(order)) if i in tied else _constraint(a.type) for i, a in enumerate(args)]
        pure = self.op.effect is Effect.PURE
        constraints = ["=" + _constraint(r) for r in results] + inputs + ([] if pure else ["~{memory}"])
        kind = ir.VoidType() if not results else results[0] if len(results) == 1 else ir.LiteralStructType(results)
        function = ir.FunctionType(kind, [a.type for a in args])
        asm = ir.InlineAsm(function, text, ",".join(constraints), side_effect=not pure)
        attributes = ["nounwind"] + ["readnone"] * pure + ["convergent"] * self.op.convergent
        value = self.builder.call(asm, args, attrs=attributes)
        return [value] if len(results) == 1 else self.elements(value, len(results))

    def special(self, register: str) -> Any:
        """A 32-bit special register, such as `tid.x`; the compiler knows its range."""
        name = f"llvm.nvvm.read.ptx.sreg.{register}"
        function = self.builder.module.globals.get(name)
        if function is None:
            function = ir.Function(self.builder.module, ir.FunctionType(I32, []), name)
        return self.builder.call(function, [])

    def u32(self, text: str, *args: Any) -> Any:
        """An asm text with one 32-bit integer result; Python integers among the arguments become constants."""
        return self.asm(text, [I32], [self.const(a) if isinstance(a, int) else a for a in args])[0]

    def f32(self, text: str, *args: Any) -> Any:
        """An asm text with one float32 result."""
        return self.asm(text, [F32], args)[0]

    def const(self, value: int, kind: ir.Type = I32) -> ir.Constant:
        return ir.Constant(kind, value)

    def wide(self, value: Any, signed: bool = False) -> Any:
        """A 32-bit integer, or a Python one, as 64 bits."""
        if isinstance(value, int):
            return ir.Constant(I64, value)
        return (self.builder.sext if signed else self.builder.zext)(value, I64)

    def zero(self) -> ir.Constant:
        return ir.Constant(F32, 0.0)

    def bits_f32(self, value: Any) -> Any:
        return self.builder.bitcast(value, F32)

    def tuple(self, values: Sequence[Any]) -> Any:
        out = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
        for i, v in enumerate(values):
            out = self.builder.insert_value(out, v, i)
        return out

    def elements(self, value: Any, count: int) -> list[Any]:
        return [self.builder.extract_value(value, i) for i in range(count)]

    def since(self, arch: int, emit: Callable[[], Any], otherwise: Any = None) -> Any:
        """What `emit` lowers to for architectures from `arch` on (900: 9.0), else `otherwise`. One IR serves all of
        them: libNVVM knows `__CUDA_ARCH` when it compiles, and one way is left."""
        module, text = self.builder.module, bytearray(b"__CUDA_ARCH\0")
        reflect, name = module.globals.get("__nvvm_reflect"), module.globals.get("reflected_arch")
        if reflect is None:
            reflect = ir.Function(module, ir.FunctionType(I32, [ir.PointerType(I8)]), "__nvvm_reflect")
            name = ir.GlobalVariable(module, ir.ArrayType(I8, len(text)), "reflected_arch", addrspace=1)
            name.linkage, name.global_constant = "internal", True
            name.initializer = ir.Constant(name.value_type, text)
        address = self.builder.addrspacecast(name.bitcast(ir.PointerType(I8, 1)), ir.PointerType(I8))
        found = self.builder.call(reflect, [address])
        before = self.builder.block
        with self.builder.if_then(self.builder.icmp_unsigned(">=", found, self.const(arch))):
            value, inside = emit(), self.builder.block
        if otherwise is None:
            return None
        either = self.builder.phi(otherwise.type)
        either.add_incoming(otherwise, before)
        either.add_incoming(value, inside)
        return either

    def static_shared(self, size: int, align: int) -> Any:
        """The 32-bit shared address of a new array of `size` bytes."""
        module = self.builder.module
        array = ir.GlobalVariable(module, ir.ArrayType(I8, size), module.get_unique_name("shared"), addrspace=3)
        array.linkage, array.align = "internal", align
        array.initializer = ir.Constant(array.value_type, ir.Undefined)
        return self.builder.ptrtoint(array, I32)

    def dynamic_shared(self, align: int) -> Any:
        """The 32-bit address of the launch's dynamic shared memory."""
        array = self.builder.module.globals.get("dynamic_shared")
        if array is None:
            kind = ir.ArrayType(I8, 0)
            array = ir.GlobalVariable(self.builder.module, kind, "dynamic_shared", addrspace=3)
            array.linkage, array.align = "external", align
        return self.builder.ptrtoint(array, I32)
