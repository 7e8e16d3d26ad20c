"""The arm that calls cuBLASLt: planned and interpreted without the library, refused on a GPU that lacks it, and on one
that has it right at awkward shapes, equal run to run, and the same kernels in a graph."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atlas_lab import cli
from atlas_lab.arms import atlas_arms
from atlas_lab.arms.library import CUBLASLT_BF16, product
from atlas_lab.core.context import Context, Pin, Preferences
from atlas_lab.core.launch import Program
from atlas_lab.core.library import LibraryLaunch
from atlas_lab.core.program import program_of, projection_call
from atlas_lab.core.registry import Registry, load_registry
from atlas_lab.core.residency import load_plan
from atlas_lab.core.route import Route
from atlas_lab.core.rows import Rows
from atlas_lab.core.target import shipped_targets
from atlas_lab.experiments import ab, config
from atlas_lab.experiments.case import Case, base_context, site_of
from atlas_lab.experiments.checks import Check, checks_of, run_check
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.parity import run_case
from atlas_lab.experiments.session import open_session
from atlas_lab.experiments.settings import Said
from atlas_lab.formats.dtypes import dtype
from atlas_lab.runtime import cublaslt
from atlas_lab.runtime.cuda import CudaDevice
from atlas_lab.runtime.device import Device, open_device
from atlas_lab.runtime.graph import capture

NAME = "bf16_library"
ARM = next(a for a in atlas_arms() if a.name == NAME)
HOPPER = next(t for t in shipped_targets() if t.arch == "sm_90a")
# K that is no multiple of 8 has rows at addresses that are no multiples of 16 bytes
SHAPES = ((17, 96, 520), (100, 520, 1111), (2, 7, 3), (37, 129, 65), (4096, 96, 520), (100, 1088, 320))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


def case_of(m: int, n: int, k: int) -> Case:
    return Case(NAME, ("ffn.gate",), m, n, k, "bf16")


def route_at(registry: Registry, m: int, *, pinned: bool = True) -> tuple[Route, Context]:
    pins = (Pin("*", NAME),) if pinned else ()
    context = replace(base_context(HOPPER), rows=(Rows(m, m),), preferences=Preferences(pins))
    return registry.resolve(site_of(case_of(m, 96, 520)), context), context


def planned(registry: Registry, m: int) -> Program:
    route, context = route_at(registry, m)
    (a,) = route.assignments
    return program_of(ARM, projection_call(route.site.projections, a, m, context))


def test_its_plan(registry: Registry) -> None:
    program = planned(registry, 17)
    (x,) = program.launches
    assert isinstance(x, LibraryLaunch)
    assert (x.entry, x.pipe, x.flops) == ("cublaslt_matmul_bf16", "mma_bf16", 2 * 17 * 96 * 520)
    assert [t.shape for t in x.reads] == [(96, 520), (17, 520)]
    assert [t.bytes for t in program.temporaries] == [32 << 20]
    assert program.traffic == x.traffic == 2 * (96 * 520 + 17 * 520 + 17 * 96)


def test_it_holds_the_weight_as_stored_alone(registry: Registry) -> None:
    plan = load_plan([route_at(registry, 17)[0]])
    assert plan.steady == plan.peak == -(-96 * 520 * 2 // 256) * 256


@pytest.mark.parametrize("m", [2, 16, 17, 4096])
def test_nothing_runs_on_it_unnamed(registry: Registry, m: int) -> None:
    assert all(a.arm != NAME for a in route_at(registry, m, pinned=False)[0].assignments)
    assert [a.arm for a in route_at(registry, m)[0].assignments] == [NAME]


def test_every_card_that_ships_may_run_it() -> None:
    assert all(t.meets(CUBLASLT_BF16.needs) for t in shipped_targets())


def test_planning_and_interpreting_ask_for_no_library(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> Any:
        raise AssertionError("the library was asked for")

    monkeypatch.setattr(cublaslt, "bindings", asked)
    planned(registry, 17)
    with open_device("interpreter", HOPPER) as device:
        found = run_case(case_of(17, 96, 520), ARM, device, base_context(HOPPER))
    assert found.ok, found.sentence


def test_its_meaning_is_the_exact_product() -> None:
    rng = np.random.default_rng(0)
    w, x = (rng.integers(-3, 4, s).astype(dtype("bf16").numpy) for s in ((5, 12), (3, 12)))
    assert (product(w, x) == x.astype(np.int64) @ w.astype(np.int64).T).all()


def absent(*_: Any) -> Any:
    raise ModuleNotFoundError("No module named 'nvmath'", name="nvmath")


SENTENCE = "cuBLASLt: nvmath is not installed; pip install 'atlas-lab[library]'"


def test_parity_on_a_gpu_is_not_run_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "bindings", absent)
    gpu: Any = SimpleNamespace(name="cuda", target=HOPPER)
    checks = {c.kind: c for c in checks_of(ARM, HOPPER)}
    for kind in ("parity", "bytes", "teeth"):
        found = run_check(checks[kind], ARM, gpu)
        assert (found.ok, found.skipped, found.sentence) == (False, True, f"{NAME}: {SENTENCE}")
    assert run_check(Check("cases", NAME), ARM, gpu).ok


YAML = """
experiments:
  x:
    model: {family: qwen3.5, hidden: 64, intermediate: 48}
    m: [17]
    roles: [ffn.gate]
    baseline: library
    variants:
      library: {weights: bf16, pins: {'ffn.*': bf16_library}}
      wgmma: {weights: bf16, pins: {'ffn.*': bf16_wgmma}}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATLAS_LAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "r.yaml").write_text(YAML)
    return tmp_path / "r.yaml"


def test_a_comparison_without_a_gpu(file: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "bindings", absent)
    monkeypatch.setattr("atlas_lab.experiments.cells.compiler_missing", lambda: "no compiler in this test")
    (x,) = ab.run_ab(config.load(file), registry, Said(device="interpreter")).experiments
    assert [(c.variant, c.arm, c.status) for c in x.cells] == [
        ("library", NAME, "passed"),
        ("wgmma", "bf16_wgmma", "passed"),
    ]
    (launch,) = x.cells[0].launches
    assert (launch.kernel, launch.grid, launch.block) == ("cublaslt_matmul_bf16", (0, 0, 0), (0, 0, 0))
    assert launch.not_compiled == (
        "library call cublaslt_matmul_bf16 (bf16_library): cuBLASLt launches kernels of its own; the interpreter "
        "computes its meaning in NumPy instead"
    )


def test_a_comparison_on_a_gpu_is_refused_without_the_library(
    file: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "bindings", absent)
    device = open_device("interpreter", HOPPER)
    device.name = "cuda"
    monkeypatch.setattr(ab, "start", lambda said, target: device)
    with pytest.raises(ConfigError, match=r"r\.yaml:9: experiments\.x\.variants\.library: ") as e:
        ab.run_ab(config.load(file), registry)
    assert str(e.value).endswith(f"experiments.x.variants.library: {SENTENCE}")


def test_in_a_block_the_launch_behind_it_is_not_dependent(file: Path, registry: Registry) -> None:
    file.write_text(
        YAML.replace("roles: [ffn.gate]", "blocks: [ffn]")
        .replace("m: [17]", "m: [2]")
        .replace("bf16_wgmma", "bf16_mma")
    )
    session = open_session(config.load(file), Said(), registry, "x", HOPPER)
    (step,) = session.plans["library"].steps
    call = CUBLASLT_BF16.name
    names = [x.entry.partition("__")[0] for x in step.program.launches]
    assert names == [call, call, "gated_product", call]
    assert [x.pdl for x in step.program.launches] == [False] * 4
    (x,) = ab.run_ab(config.load(file), registry, Said(device="interpreter")).experiments
    assert x.cells[0].status == "passed", x.cells[0].reason


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(cublaslt, "bindings", absent)

    def command(*argv: str) -> tuple[int, str, str]:
        status = cli.run(list(argv))
        out, err = capsys.readouterr()
        return status, out, err

    return command


def test_the_verbs_say_what_it_is(run: Run) -> None:
    status, out, _ = run("arms", "--json", "-")
    (mine,) = (a for a in json.loads(out)["arms"] if a["name"] == NAME)
    assert (status, mine["kernels"], mine["library_calls"]) == (0, [], ["cublaslt_matmul_bf16"])
    assert mine["needs"] == "sm_80 or later, cuBLASLt"
    status, out, _ = run("doctor", "--json", "-")
    (row,) = (r for r in json.loads(out)["rows"] if r["what"] == "cuBLASLt")
    assert (status, row["state"]) == (0, "missing")
    assert "pip install 'atlas-lab[library]'" in row["found"] or "nvmath-python" in row["found"]
    status, _, err = run("inspect", NAME)
    assert (status, err) == (
        2,
        f"atlas-lab: inspect {NAME}: found a library call, cuBLASLt (cublaslt_matmul_bf16), expected kernels of its "
        "own to compile\n",
    )


def test_doctor_names_the_version(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "bindings", lambda: SimpleNamespace(lt=SimpleNamespace(get_version=lambda: 130100)))
    _, out, _ = run("doctor", "--json", "-")
    (row,) = (r for r in json.loads(out)["rows"] if r["what"] == "cuBLASLt")
    assert (row["state"], row["found"].partition(",")[0]) == ("ok", "13.1.0")


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    """With the library."""
    needs_the_library(request)
    with open_device("cuda") as opened:
        assert isinstance(opened, CudaDevice)
        yield opened


def needs_the_library(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device", "auto") != "cuda":
        pytest.skip("needs --device=cuda")
    missing = cublaslt.missing()
    if missing:
        pytest.skip(missing)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_right_and_the_same_twice(gpu: CudaDevice, shape: tuple[int, int, int]) -> None:
    """Twice over the scratch that the first run left, as every parity on a GPU."""
    found = run_case(case_of(*shape), ARM, gpu, base_context(gpu.target))
    assert found.ok, found.sentence


def bound_at(device: Device, registry: Registry, m: int, n: int, k: int, pins: tuple[Pin, ...]) -> tuple[Any, Any, str]:
    context = replace(base_context(device.target), rows=(Rows(m, m),), preferences=Preferences(pins))
    route = registry.resolve(site_of(case_of(m, n, k)), context)
    (a,) = route.assignments
    program = program_of(registry.arm(a.arm), projection_call(route.site.projections, a, m, context))
    buffers = {t.name: device.allocate(t.bytes, "test", name=t.name) for t in program.buffers}
    rng = np.random.default_rng([m, n, k])
    for t in (*program.inputs, *program.persistent):
        device.upload(buffers[t.name], rng.standard_normal(t.shape).astype(dtype("bf16").numpy))
    return device.bind(program, buffers), buffers, program.outputs[0].name


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(17, 17408, 5120), (100, 520, 1111), (512, 5120, 2176)])
def test_a_graph_holds_the_kernels_and_gives_the_bits_of_a_run(
    gpu: CudaDevice, registry: Registry, shape: tuple[int, int, int], record_property: Callable[[str, object], None]
) -> None:
    m, n, k = shape
    bound, buffers, y = bound_at(gpu, registry, m, n, k, (Pin("*", NAME),))
    (launcher,) = bound._launchers
    record_property("algorithm", launcher.description)
    record_property("nodes", "; ".join(map(str, bound.nodes)))
    assert bound.nodes
    bound.run()
    bound.verify()
    once = gpu.download(buffers[y], "bf16", (m, n)).tobytes()
    with capture([bound, bound]) as graph:
        graph.verify()
        for _ in range(2):
            gpu.poison(buffers[y])
            graph.replay()
            gpu.synchronize()
            assert gpu.download(buffers[y], "bf16", (m, n)).tobytes() == once
    for b in buffers.values():
        gpu.check_guards(b)


@pytest.mark.gpu
def test_a_comparison_on_a_gpu(request: pytest.FixtureRequest, file: Path, registry: Registry) -> None:
    needs_the_library(request)
    (x,) = ab.run_ab(config.load(file), registry, Said(device="cuda")).experiments
    assert [(c.arm, c.status) for c in x.cells] == [(NAME, "passed"), ("bf16_wgmma", "passed")], x.cells
    assert all(c.time is not None for c in x.cells)
    assert all(c.verdict for c in x.comparisons)
