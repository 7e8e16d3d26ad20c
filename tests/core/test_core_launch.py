"""Launches, programs, calls: what fits a kernel and what is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_fakes import A100, H200, Fake, catalog, context, nothing, projection, site

from atlas_lab.core.arm import kernels_of
from atlas_lab.core.call import Epilogue, Fields, Operand, weights_of
from atlas_lab.core.declare import Bind
from atlas_lab.core.enqueued import LaunchError
from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.levers import Levers
from atlas_lab.core.program import PlanError, program_of, projection_call, settled
from atlas_lab.core.resolve import resolve
from atlas_lab.core.rows import rows
from atlas_lab.core.tensor import Tensor
from atlas_lab.core.tensor_map import TensorMap
from atlas_lab.kernels import lang as L

W, X, Y = Tensor("bf16", (8, 4), "w"), Tensor("bf16", (1, 4), "x"), Tensor("bf16", (1, 8), "y")


@L.kernel(launch_bounds=(64, 2))
def scaled(w: L.In[L.bf16], both: L.InOut[L.f32], y: L.Out[L.bf16], n: L.i32, s: L.f32, u: L.u32):
    pass


@L.kernel
def waiting(x: L.In[L.bf16], y: L.Out[L.bf16]):
    L.grid_wait()


@L.kernel
def clustered(x: L.In[L.bf16], y: L.Out[L.bf16]):
    L.cluster_arrive()


@L.kernel
def tiled(x: L.InMap[L.bf16], y: L.OutMap[L.bf16]):
    pass


F = Tensor("f32", (8,), "f")
TILES, OUT = (TensorMap(Tensor("bf16", (8, 64), name), (8, 64), 128) for name in ("tiles", "out"))


def test_what_it_reads_writes_and_moves() -> None:
    launch = Launch(scaled, grid=(2, 3), block=64, args=(W, F, Operand(Y), 8, 0.5, 7))
    assert (launch.grid, launch.block, launch.cluster) == ((2, 3, 1), (64, 1, 1), (1, 1, 1))
    assert (launch.blocks, launch.threads) == (6, 64)
    assert (launch.reads, launch.writes) == ((W, F), (F, Y))
    assert launch.traffic == 64 + 32 + 32 + 16
    assert Launch(scaled, grid=1, block=64, args=(Y, F, Y, 8, 0.5, 7)).traffic == 32 + 16 + 32 + 16
    mapped = Launch(tiled, grid=4, block=1, args=(TILES, OUT), cluster=(2,))
    assert (mapped.reads, mapped.writes, mapped.cluster) == ((TILES.view,), (OUT.view,), (2, 1, 1))
    assert mapped.traffic == 2 * TILES.view.bytes


def args(**changed: Any) -> tuple[Any, ...]:
    return tuple(({"w": W, "both": F, "y": Y, "n": 8, "s": 0.5, "u": 7} | changed).values())


BAD = {
    "count": ({"args": args()[:-1]}, "found 5 arguments, expected 6"),
    "dtype": ({"args": args(w=F)}, "argument 'w' is f32, expected bf16"),
    "a number for a tensor": ({"args": args(w=3)}, "argument 'w' is int, expected bf16"),
    "a map for a tensor": ({"args": args(w=TILES)}, "argument 'w' is a tensor map, expected a tensor"),
    "no cluster": ({"cluster": 0}, "found cluster (0, 1, 1), expected 1 to 8 blocks"),
    "too large a cluster": ({"cluster": (4, 4)}, "found cluster (4, 4, 1), expected 1 to 8 blocks"),
    "part of a cluster": ({"grid": 3, "cluster": 2}, "found grid (3, 1, 1), expected a multiple of cluster (2, 1, 1)"),
    "a tensor for a number": ({"args": args(n=W)}, "argument 'n' is w: bf16[8, 4], expected a number"),
    "a fraction for an integer": ({"args": args(n=8.5)}, "argument 'n' is 8.5, expected i32"),
    "an integer too large": ({"args": args(n=1 << 31)}, "argument 'n' is 2147483648, expected i32"),
    "a negative for an unsigned": ({"args": args(u=-1)}, "argument 'u' is -1, expected u32"),
    "deep grid": ({"grid": (4, 65536)}, "found grid (4, 65536, 1), expected at most (2147483647, 65535, 65535)"),
    "empty grid": ({"grid": (0, 2)}, "found grid (0, 2, 1), block (64, 1, 1), expected 1 or more"),
    "four extents": ({"grid": (1, 1, 1, 1)}, "found 4 extents, expected one to three"),
    "too many threads": ({"block": (64, 2)}, "found 128 threads a block, its launch bounds allow 64"),
    "negative shared memory": ({"shared": -1}, "found -1 bytes of shared memory, expected 0 or more"),
    "dependent without a wait": ({"pdl": True}, "a dependent launch of a kernel without grid_wait would race"),
    "no such pipe": (
        {"pipe": "mma_fp8"},
        "found pipe 'mma_fp8', expected one of fma, mma_bf16, mma_f16, mma_e4m3, mma_s8, mma_nvfp4",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_launch_that_does_not_fit_its_kernel(case: str) -> None:
    how, sentence = BAD[case]
    with pytest.raises(LaunchError) as e:
        Launch(**({"kernel": scaled, "grid": 1, "block": 64, "args": args()} | how))
    assert str(e.value) == f"launch of {scaled.entry}: {sentence}"


BAD_MAPS = {
    "a tensor": (TILES.view, "argument 'x' is a tensor, expected a tensor map"),
    "a number": (3, "argument 'x' is int, expected a tensor map"),
    "another dtype": (TensorMap(Tensor("f16", (8, 64), "t"), (8, 64)), "argument 'x' is f16, expected bf16"),
}


@pytest.mark.parametrize("case", BAD_MAPS)
def test_what_is_no_map_is_refused_in_a_sentence(case: str) -> None:
    x, sentence = BAD_MAPS[case]
    with pytest.raises(LaunchError) as e:
        Launch(tiled, grid=1, block=1, args=(x, OUT))
    assert str(e.value) == f"launch of {tiled.entry}: {sentence}"


def test_a_program_knows_every_buffer() -> None:
    launch = Launch(nothing, grid=1, block=32, args=(W, X, Y, 8), flops=64)
    program = Program("p", (launch, launch), inputs=(X,), outputs=(Y,), persistent=(W,))
    assert (program.flops, program.traffic) == (128, 64 + 8 + 16)
    assert program.renamed("q").name == "q"
    with pytest.raises(LaunchError, match=r"program p: nothing__\w+ names w: bf16\[8, 4\], which has no role in it"):
        Program("p", (launch,), inputs=(X,), outputs=(Y,))


def test_from_a_route_to_a_program() -> None:
    s, arm, ctx = site("ffn.gate", "ffn.up"), Fake("pair", ["ffn.gate+ffn.up"], rows(1, 4)), context(rows(1, 4))
    (a,) = resolve(s, ctx, catalog(arm)).assignments
    call = projection_call(s.projections, a, 3, ctx)
    assert (call.m, call.n, call.k, call.roles) == (3, 64, 64, ("ffn.gate", "ffn.up"))
    assert call.weights["ffn.up"].weight == s["ffn.up"].weight["weight"]
    program = program_of(arm, call)
    assert [t.shape for t in program.buffers] == [(3, 64), (3, 64), (32, 64), (32, 64)]
    assert [t.name for t in program.inputs] == ["layers.0.ffn.gate+ffn.up/x"]
    with pytest.raises(PlanError, match="arm pair serves M 1 to 4, found M=5"):
        program_of(arm, projection_call(s.projections, a, 5, ctx))
    with pytest.raises(PlanError, match="arm pair does not fuse activation, expected"):
        program_of(arm, projection_call(s.projections, a, 1, ctx, Epilogue(activation="silu")))
    with pytest.raises(PlanError, match=r"arm pair does not fuse silu into its input, expected \[\]"):
        program_of(arm, replace(call, prologue="silu"))
    arm.activation = "fp8"
    with pytest.raises(PlanError, match="arm pair reads fp8, found bf16"):
        program_of(arm, call)


def test_scratch_is_named_and_temporary() -> None:
    class Split(Fake):
        def scratch(self, call: Any) -> dict[str, Tensor]:
            return {"partial": Tensor("bf16", (2, call.m, call.n))}

        def lower(self, call: Any) -> list[Launch]:
            (w,) = call.weights["ffn.up"].values()
            return [Launch(nothing, 1, 32, (w, call.x, call.scratch["partial"], call.n))]

    s, arm, ctx = site("ffn.up"), Split("split"), context(rows(1))
    call = projection_call(s.projections, resolve(s, ctx, catalog(arm)).at("ffn.up", 1), 1, ctx)
    (t,) = program_of(arm, call).temporaries
    assert (t.name, t.shape) == ("layers.0.ffn.up/y/partial", (2, 1, 32))


@pytest.mark.parametrize("made", [None, [Tensor("f32", (4,))], {"partial": 5}])
def test_a_scratch_that_returns_something_else_is_one_sentence(made: Any) -> None:
    class Odd(Fake):
        def scratch(self, call: Any) -> Any:
            return made

    s, arm, ctx = site("ffn.up"), Odd("odd"), context(rows(1))
    call = projection_call(s.projections, resolve(s, ctx, catalog(arm)).at("ffn.up", 1), 1, ctx)
    with pytest.raises(PlanError, match=r"scratch of arm odd returned .*, expected a mapping from names to Tensor"):
        program_of(arm, call)


@pytest.mark.parametrize("made", [None, [None], ["launch"], 7])
def test_a_lower_that_returns_something_else_is_one_sentence(made: Any) -> None:
    class Odd(Fake):
        def lower(self, call: Any) -> Any:
            return made

    s, arm, ctx = site("ffn.up"), Odd("odd"), context(rows(1))
    call = projection_call(s.projections, resolve(s, ctx, catalog(arm)).at("ffn.up", 1), 1, ctx)
    with pytest.raises(PlanError, match=r"lower of arm odd returned .*, expected a list of Launch"):
        program_of(arm, call)


def test_a_kernel_the_arm_does_not_list_is_refused() -> None:
    class Hides(Fake):
        def lower(self, call: Any) -> Any:
            return [Launch(scaled, 1, 32, (Y, F, Y, 1, 1.0, 1))]

    s, arm, ctx = site("ffn.up"), Hides("hides"), context(rows(1))
    call = projection_call(s.projections, resolve(s, ctx, catalog(arm)).at("ffn.up", 1), 1, ctx)
    with pytest.raises(PlanError, match=r"arm hides launches scaled.*, which its `kernels` do not list"):
        program_of(arm, call)


def test_an_optional_kernel_is_launched_only_where_the_target_has_what_it_needs() -> None:
    class Clusters(Fake):
        optional_kernels = (clustered,)

        def lower(self, call: Any) -> Any:
            return [Launch(clustered, 1, 32, (call.x, call.y))]

    s, arm = site("ffn.up"), Clusters("clusters")
    assert kernels_of(arm) == (nothing, clustered)
    for target in (H200, A100):
        ctx = context(rows(1), target=target)
        call = projection_call(s.projections, resolve(s, ctx, catalog(arm)).at("ffn.up", 1), 1, ctx)
        if target is H200:
            assert [x.kernel for x in program_of(arm, call).launches] == [clustered]
        else:
            with pytest.raises(
                PlanError, match=r"arm clusters launches clustered.*, which needs sm_90 or later, found a100"
            ):
                program_of(arm, call)


def test_launches_are_dependent_where_kernel_target_and_lever_say_so() -> None:
    launches = (
        Launch(waiting, 1, 32, (X, Y)),
        Launch(waiting, 1, 32, (X, Y), pdl=False),
        Launch(nothing, 1, 32, (W, X, Y, 8)),
    )
    assert [x.pdl for x in launches] == [None, False, None]
    off = Levers(pdl=False)
    for ctx, first in (
        (context(rows(1), target=H200), True),
        (context(rows(1), target=A100), False),
        (replace(context(rows(1), target=H200), levers=off), False),
    ):
        assert [settled(x, ctx).pdl for x in launches] == [first, False, False]


def test_the_lifetime_of_a_buffer() -> None:
    a, b = (Tensor("bf16", (8,), name) for name in "ab")
    launches = tuple(Launch(waiting, 1, 32, args) for args in ((X, a), (a, b), (a, Y)))
    program = Program("p", launches, (X,), (Y,), temporaries=(a, b))
    assert [program.lifetime(t) for t in (X, a, b, Y)] == [(0, 0), (0, 2), (1, 1), (2, 2)]
    with pytest.raises(LaunchError, match="program p: no launch names w: f32"):
        program.lifetime(F.named("w"))


def test_fields_and_weights() -> None:
    f = Fields({"q": W, "scale": F})
    assert (f.q, f["scale"], len(f), list(f)) == (W, F, 2, ["q", "scale"])
    with pytest.raises(AttributeError, match="no field 'scales', expected one of q, scale"):
        _ = f.scales
    p = projection("ffn.up")
    assert weights_of((Bind(p.weight),))["weight"].weight == p.weight["weight"]
    with pytest.raises(ValueError, match="key 'weight' is declared twice"):
        weights_of((Bind(p.weight), Bind(p.weight)))


def test_the_epilogue_lists_its_parts_in_order() -> None:
    assert Epilogue().parts == ()
    assert Epilogue(quantize="fp8", residual=Y, alpha=((8, F),), activation="silu").parts == (
        "alpha",
        "activation",
        "residual",
        "quantize",
    )
