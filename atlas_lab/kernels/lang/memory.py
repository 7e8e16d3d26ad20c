"""Loads and stores of global memory, and pointer arithmetic.

Indexes are in elements of the pointer's dtype; an access is as wide as its name says (`v4_b32`: 16 bytes) and must
be aligned to its width. Narrow loads return u32, zero-extended. `ldg_*` read `In` pointers through the non-coherent
path: the compiler may move them anywhere, since nothing writes that memory while the grid runs. `ld_*` read memory
that the kernel also writes, in program order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atlas_lab.kernels.lang.bits import BF16, M32, bf16_bits, single
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.op import Dtype, Effect, Needs, Op, Operand, Ptr, PtrTo, Vec
from atlas_lab.kernels.lang.types import Pointer, Scalar, f32, u8, u16, u32

IN = Ptr(("global",), ("in",))
WRITABLE = Ptr(("global",), ("out", "inout"))
SHARED = Ptr(("shared",))
ANY = Ptr(("global", "shared", "cluster"))

LD, _NC, _ST = (f"9.7.9 Data Movement: {i}" for i in ("ld", "ld.global.nc", "st"))
# PTX type and register list of an access, by name.
FORMS: dict[str, tuple[str, Scalar, int]] = {
    "b8": ("u8", u8, 1),
    "b16": ("u16", u16, 1),
    "b32": ("b32", u32, 1),
    "v2_b32": ("v2.b32", u32, 2),
    "v4_b32": ("v4.b32", u32, 4),
    "f32": ("f32", f32, 1),
    "v4_f32": ("v4.f32", f32, 4),
}


def registers(count: int, first: int = 0) -> str:
    """`$0` or `{$0, $1, …}`."""
    names = [f"${first + i}" for i in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"


def _value(unit: Scalar, count: int) -> Scalar | Vec:
    narrow = u32 if unit.bits < 32 else unit
    return Vec(narrow, count) if count > 1 else narrow


def load(
    name: str,
    form: str,
    instruction: str,
    pointer: Ptr,
    effect: Effect,
    section: str,
    width: str = "",
    needs: Needs = Needs(),
) -> Op:
    """A load called `name`: `form` says what is read, `instruction` is the PTX up to the type."""
    kind, unit, count = FORMS[form]

    def one(p: Pointer, i: int) -> Any:
        return current().read(p, i, unit, 1)[0]

    def many(p: Pointer, i: int) -> Any:
        return current().read(p, i, unit, count)

    text = f"{instruction}{width}.{kind} {registers(count)}, [${count}];"
    return Op(
        name,
        (pointer,),
        _value(unit, count),
        ptx=text,
        numpy=one if count == 1 else many,
        effect=effect,
        needs=needs,
        section=section,
    )


def store(name: str, form: str, instruction: str, pointer: Ptr, section: str, needs: Needs = Needs()) -> Op:
    """A store called `name`."""
    kind, unit, count = FORMS[form]
    value = _value(unit, count)
    mask = unit.mask

    def one(p: Pointer, i: int, v: Any) -> None:
        current().write(p, i, unit, (single(v) if unit is f32 else int(v) & mask,))

    def many(p: Pointer, i: int, v: Any) -> None:
        current().write(p, i, unit, [single(x) if unit is f32 else int(x) & mask for x in v])

    operands: tuple[Operand, ...] = (pointer, value)
    text = f"{instruction}.{kind} [$0], {registers(count, 1)};"
    return Op(
        name,
        operands,
        None,
        ptx=text,
        numpy=one if count == 1 else many,
        effect=Effect.WRITE,
        needs=needs,
        section=section,
    )


def _ldg(form: str) -> Op:
    return load(f"ldg_{form}", form, "ld.global.nc", IN, Effect.PURE, _NC)


def streaming(name: str, form: str, instruction: str, effect: Effect, section: str, width: int = 0) -> Op:
    """A load called `name` that L1 does not keep; `width` bytes are what L2 fetches of memory together."""
    wide, needs = (f".L2::{width}B", Needs((8, 0))) if width else ("", Needs())
    return load(name, form, f"{instruction}.L1::no_allocate", IN, effect, section, wide, needs)


def _ldg_stream(form: str) -> Op:
    return streaming(f"ldg_{form}_stream", form, "ld.global.nc", Effect.PURE, _NC, 256 if form == "v4_b32" else 0)


ldg_b8, ldg_b16, ldg_b32, ldg_v2_b32, ldg_v4_b32, ldg_f32 = map(_ldg, ("b8", "b16", "b32", "v2_b32", "v4_b32", "f32"))
ldg_b8_stream, ldg_b16_stream, ldg_b32_stream, ldg_v2_b32_stream, ldg_v4_b32_stream = map(
    _ldg_stream, ("b8", "b16", "b32", "v2_b32", "v4_b32")
)
ldg_v4_b32_line = streaming("ldg_v4_b32_line", "v4_b32", "ld.global.nc", Effect.PURE, _NC, 128)
ld_b32, ld_f32, ld_v4_b32 = (
    load(f"ld_{form}", form, "ld.global", WRITABLE, Effect.READ, LD) for form in ("b32", "f32", "v4_b32")
)
stg_b8, stg_b16, stg_b32, stg_v2_b32, stg_v4_b32, stg_f32 = (
    store(f"stg_{form}", form, "st.global", WRITABLE, _ST) for form in ("b8", "b16", "b32", "v2_b32", "v4_b32", "f32")
)


def _prefetch(p: Pointer, i: int) -> None:
    """Ask L2 to fetch the line of 128 bytes that holds this element; nothing waits for it."""
    current().read(p, i, u8, 1)


prefetch_l2 = Op(
    "prefetch_l2",
    (IN,),
    None,
    ptx="prefetch.global.L2 [$0];",
    numpy=_prefetch,
    effect=Effect.READ,
    section="9.7.9 Data Movement: prefetch",
)


def read_bf16(p: Pointer, i: int) -> Any:
    """One bf16 as f32."""
    return BF16[current().read(p, i, u16, 1)[0]]


def emit_bf16(instruction: str) -> Callable[..., Any]:
    def emit(e: Any, address: Any) -> Any:
        return e.bits_f32(e.builder.shl(e.u32(f"{instruction}.u16 $0, [$1];", address), e.const(16)))

    return emit


ldg_bf16 = Op("ldg_bf16", (IN,), f32, ptx=emit_bf16("ld.global.nc"), numpy=read_bf16, section=_NC)
ld_bf16 = Op("ld_bf16", (WRITABLE,), f32, ptx=emit_bf16("ld.global"), numpy=read_bf16, effect=Effect.READ, section=LD)


def _write_bf16(p: Pointer, i: int, x: Any) -> None:
    """One f32, rounded to bf16 (nearest, ties to even)."""
    current().write(p, i, u16, (bf16_bits(x),))


def _write_bf16x2(p: Pointer, i: int, lo: Any, hi: Any) -> None:
    """Two f32, rounded to bf16: `lo` at element i, `hi` after it."""
    current().write(p, i, u32, (bf16_bits(lo) | bf16_bits(hi) << 16,))


stg_bf16 = Op(
    "stg_bf16",
    (WRITABLE, f32),
    None,
    numpy=_write_bf16,
    effect=Effect.WRITE,
    needs=Needs((8, 0)),
    section=_ST,
    ptx="{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }",
)
stg_bf16x2 = Op(
    "stg_bf16x2",
    (WRITABLE, f32, f32),
    None,
    numpy=_write_bf16x2,
    effect=Effect.WRITE,
    needs=Needs((8, 0)),
    section=_ST,
    ptx="{ .reg .b32 v; cvt.rn.bf16x2.f32 v, $2, $1; st.global.b32 [$0], v; }",
)


def _acquire(p: Pointer, i: int) -> int:
    """Load at gpu scope; what the releasing thread wrote before is visible after."""
    value: int = current().read(p, i, u32, 1, "acquire")[0]
    return value


def _release(p: Pointer, i: int, v: int) -> None:
    """Store at gpu scope, after everything this thread wrote before."""
    current().write(p, i, u32, (int(v) & M32,), "release")


ld_acquire_b32 = Op(
    "ld_acquire_b32",
    (WRITABLE,),
    u32,
    ptx="ld.acquire.gpu.global.b32 $0, [$1];",
    numpy=_acquire,
    effect=Effect.SYNC,
    section=LD,
)
st_release_b32 = Op(
    "st_release_b32",
    (WRITABLE, u32),
    None,
    ptx="st.release.gpu.global.b32 [$0], $1;",
    numpy=_release,
    effect=Effect.SYNC,
    section=_ST,
)


def _offset(p: Pointer, elements: int) -> Pointer:
    """The pointer `elements` further on."""
    return Pointer(p.buffer, p.offset + int(elements) * p.dtype.bytes, p.dtype, p.space, p.mode)


def _cast(p: Pointer, dtype: Scalar) -> Pointer:
    """The same address as a pointer to another element type."""
    return Pointer(p.buffer, p.offset, dtype, p.space, p.mode)


offset = Op("offset", (ANY,), lambda to: to, ptx=lambda e, address: address, numpy=_offset, section="6.4.1 Addresses")
cast = Op(
    "cast",
    (Ptr(ANY.spaces, indexed=False), Dtype("dtype")),
    lambda to, dtype: PtrTo(dtype, to.space, to.mode),
    ptx=lambda e, address, dtype: address,
    numpy=_cast,
    section="6.4.1 Addresses",
)
