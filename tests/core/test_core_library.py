"""Calls of libraries: what fits them, what arms may make of them, and what stands behind them in a program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_fakes import A100, H200, Fake, catalog, context, nothing, site, third_party

from atlas_lab.core.call import Operand
from atlas_lab.core.candidate import unmet_needs
from atlas_lab.core.context import Order, Pin
from atlas_lab.core.enqueued import LaunchError
from atlas_lab.core.launch import Launch, Program
from atlas_lab.core.library import LibraryCall, LibraryLaunch, after_libraries
from atlas_lab.core.program import PlanError, program_of, projection_call
from atlas_lab.core.registry import validate
from atlas_lab.core.resolve import resolve
from atlas_lab.core.rows import rows
from atlas_lab.core.tensor import Tensor
from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang.types import Parameter

W, X, Y = Tensor("bf16", (8, 4), "w"), Tensor("bf16", (2, 4), "x"), Tensor("bf16", (2, 8), "y")
SPACE = Tensor("u8", (1024,), "space")
PARAMS = (
    Parameter("in", L.bf16, name="w"),
    Parameter("in", L.bf16, name="x"),
    Parameter("out", L.bf16, name="y"),
    Parameter("out", L.u8, name="space"),
)


def never(*_: Any) -> Any:
    raise AssertionError("a plan calls no library")


def product(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ w.astype(np.float64).T


CALL = LibraryCall("some_matmul", "SomeLib", PARAMS, L.Needs((9, 0)), never, never, product, workspace="space")


@L.kernel
def waiting(x: L.In[L.bf16], y: L.Out[L.bf16]):
    L.grid_wait()


class Calls(Fake):
    """An arm that calls a library, then launches a kernel that waits."""

    def __init__(self, name: str = "calls", *, listed: bool = True, after: bool = False) -> None:
        super().__init__(name, rows=rows(2, 64), kernels=(waiting,) if after else ())
        self.library_calls = (CALL,) if listed else ()
        self.after = after

    def scratch(self, call: Any) -> dict[str, Tensor]:
        return {"space": Tensor("u8", (1024,))}

    def lower(self, call: Any) -> list[Any]:
        (w,) = call.weights[call.roles[0]].values()
        made = LibraryLaunch(CALL, (w, call.x, call.y, call.scratch["space"]), flops=2 * call.m * call.n * call.k)
        return [made, Launch(waiting, grid=1, block=32, args=(call.x, call.y))] if self.after else [made]


def planned(arm: Calls) -> Program:
    one = site("ffn.up")
    ctx = context(rows(2), pins=[Pin("ffn.up", arm.name)])
    (a,) = resolve(one, ctx, catalog(arm)).assignments
    return program_of(arm, projection_call(one.projections, a, 2, ctx))


def test_what_it_reads_writes_and_moves() -> None:
    made = LibraryLaunch(CALL, (W, Operand(X), Y, SPACE), flops=128, pipe="mma_bf16", label="up")
    assert (made.reads, made.writes) == ((W, X), (Y, SPACE))
    assert made.traffic == W.bytes + X.bytes + Y.bytes  # what it does with its workspace is the library's
    assert (made.entry, made.title, made.pdl) == ("some_matmul", "library call some_matmul (up)", False)
    program = Program("p", (made,), inputs=(X,), outputs=(Y,), persistent=(W,), temporaries=(SPACE,))
    assert (program.lifetime(SPACE), program.flops) == ((0, 0), 128)
    with pytest.raises(LaunchError, match=r"program p: some_matmul names space: u8\[1024\], which has no role in it"):
        replace(program, temporaries=())


BAD = {
    "count": ((W, X, Y), "found 3 arguments, expected 4"),
    "dtype": ((W, SPACE, Y, SPACE), "argument 'x' is u8, expected bf16"),
    "a number": ((W, 3, Y, SPACE), "argument 'x' is int, expected bf16"),
    "columns": (
        (W, replace(X, strides=(8, 1)), Y, SPACE),
        "argument 'x' has strides (8, 1), expected a contiguous tensor",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_call_that_does_not_fit_its_parameters(case: str) -> None:
    args, sentence = BAD[case]
    with pytest.raises(LaunchError) as e:
        LibraryLaunch(CALL, args)
    assert str(e.value) == f"library call some_matmul: {sentence}"


def test_a_call_has_one_output() -> None:
    with pytest.raises(LaunchError, match=r"library call some_matmul: found outputs \['y', 'space'\], expected"):
        replace(CALL, workspace="")
    assert CALL.output == 2


def test_an_arm_makes_the_calls_that_it_lists() -> None:
    program = planned(Calls())
    assert [x.entry for x in program.launches] == ["some_matmul"]
    assert [t.bytes for t in program.temporaries] == [1024]
    sentence = "makes the library call some_matmul, which its `library_calls` do not list"
    with pytest.raises(PlanError, match=sentence):
        planned(Calls(listed=False))


def test_the_launch_behind_a_call_is_not_dependent() -> None:
    assert [x.pdl for x in planned(Calls(after=True)).launches] == [False, False]
    call = LibraryLaunch(CALL, (W, X, Y, SPACE))
    kernel = Launch(waiting, grid=1, block=32, args=(X, Y), pdl=True)
    assert [x.pdl for x in after_libraries((kernel, call, kernel, kernel))] == [True, False, False, True]
    assert after_libraries(()) == ()


def test_it_runs_only_where_it_is_named() -> None:
    one, library, default = site("ffn.up"), Calls(), Fake("kernels", rows=rows(1, 16))
    served = {a.rows: a.arm for a in resolve(one, context(rows(1, 16)), catalog(library, default)).assignments}
    assert served == {rows(1, 16): "kernels"}
    order = Order("ffn.*", rows(1, 16), ("calls",), "arms")
    ctx = context(rows(1, 16), orders=[order])
    served = {a.rows: a.arm for a in resolve(one, ctx, catalog(default, library)).assignments}
    assert served == {rows(1): "kernels", rows(2, 16): "calls"}
    assert not any(e.default for e in (*catalog(library), third_party(default)))


def test_the_hardware_that_a_library_needs_is_checked() -> None:
    verdict = unmet_needs(Calls(), A100)
    assert verdict is not None
    assert verdict.code == "needs"
    assert str(verdict).startswith("SomeLib call some_matmul needs sm_90 or later (found a100 ")
    assert unmet_needs(Calls(), H200) is None


def test_an_arm_has_kernels_or_library_calls() -> None:
    validate(Calls())
    with pytest.raises(TypeError, match=r"arm calls: kernels is \(\), expected a tuple of kernels"):
        validate(Calls(listed=False))
    wrong = Calls()
    wrong.library_calls = (nothing,)  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"arm calls: library_calls is .* expected a tuple of library calls"):
        validate(wrong)
