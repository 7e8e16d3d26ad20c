"""`tune` on the interpreter, with a clock of our own: what is tried, judged, chosen, written and left out."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from atlas_lab.core.registry import Registry, load_registry
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tuned_file import TunedFile, parse_tuned
from atlas_lab.core.tuning import Choice, Table, TuningError, setting
from atlas_lab.experiments import timed, tune, tune_clock, tune_table
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.results import dumps
from atlas_lab.experiments.settings import Said
from atlas_lab.experiments.tune_jobs import PRESETS, Job, Joint, jobs, joints_of, shapes_of
from atlas_lab.experiments.tune_results import TuneResult
from atlas_lab.experiments.tune_weights import Repeated, site_of
from atlas_lab.formats import FORMATS
from atlas_lab.runtime import probe, timing
from atlas_lab.runtime.device import Device, open_device

ARMS = Path(__file__).parent / "tunable_arms.py"
N, K = 8, 64


@pytest.fixture(scope="module")
def tunable() -> Registry:
    made = load_registry([str(ARMS)])
    made.targets = {t.name: t for t in shipped_targets()}
    made.formats = {**FORMATS, **made.formats}
    return made


class Clock:
    """Microseconds by the setting's lanes and M; the read kernel takes 2."""

    def __init__(self, us: dict[int, dict[int, float]]) -> None:
        self.us, self.asked, self.bytes = us, 0, 0

    def __call__(self, device: Device, runs, nbytes: int, seed: int) -> dict[str, float]:
        self.asked, self.bytes = self.asked + 1, nbytes
        out = {tune.READ: 2e-6}
        for r in runs:
            lanes = dict(r.step.program.launches[0].kernel.spec.parameters)["lanes"]
            out[r.name] = self.us[lanes][r.step.m] * 1e-6
        return out


FLAT = {lanes: {1: 4.0, 8: 4.0, 16: 4.0} for lanes in (32, 16, 8)}


def tuned(
    registry: Registry, *names: str, us=FLAT, shape=(N, K), before: Table = Table(), joint: str = "", **more
) -> TuneResult:
    result = TuneResult(command="atlas-lab tune", device={"name": "test"}, tool={"name": "atlas-lab", "version": "0"})
    with open_device("interpreter") as device:
        tuner = tune.Tuner(registry, Said(), device, Clock(us), top=more.pop("top", 8), table=before)
        todo = jobs(registry, names, [] if joint else [shape], "", joints_of(joint) if joint else ())
        tune.run(tuner, todo, result, **more)
        assert device.ledger.held == 0
    return result


def test_the_fastest_over_all_rows_wins(tunable: Registry) -> None:
    us = {32: {1: 4.0, 8: 6.0, 16: 9.0}, 16: {1: 5.0, 8: 5.0, 16: 5.0}, 8: {1: 3.0, 8: 6.0, 16: 12.0}}
    (cell,) = tuned(tunable, "tunable", us=us).cells
    assert (cell.status, cell.legal, cell.read_us) == ("tuned", 3, 2.0)
    assert [t.setting for t in cell.tried] == [{"lanes": 32}, {"lanes": 16}, {"lanes": 8}]
    assert [t.of_read for t in cell.tried] == pytest.approx([3.0, 2.5, 3.0])
    assert cell.best == 1


def test_within_a_hundredth_the_models_first_wins(tunable: Registry) -> None:
    near = {32: {1: 4.03, 8: 4.03, 16: 4.03}, 16: {1: 4.0, 8: 4.0, 16: 4.0}, 8: {1: 4.0, 8: 4.0, 16: 4.0}}
    assert tuned(tunable, "tunable", us=near).cells[0].best == 0
    far = {**near, 32: {1: 4.05, 8: 4.05, 16: 4.05}}
    assert tuned(tunable, "tunable", us=far).cells[0].best == 1
    assert tune.winner([None, 2.0, 1.985]) == 1


def test_only_the_models_best_run_and_what_was_best_before(tunable: Registry) -> None:
    (cell,) = tuned(tunable, "tunable", top=1).cells
    assert [t.setting["lanes"] for t in cell.tried] == [32]
    before = Table.of([Choice("tunable", N, K, setting(lanes=8))])
    assert [t.setting["lanes"] for t in tuned(tunable, "tunable", top=1, before=before).cells[0].tried] == [32, 8]
    stale = Table.of([Choice("tunable", N, K, setting(lanes=9))])
    assert [t.setting["lanes"] for t in tuned(tunable, "tunable", top=1, before=stale).cells[0].tried] == [32]


def test_a_wrong_setting_is_not_timed(tunable: Registry) -> None:
    result = tuned(tunable, "faulty", us={**FLAT, 16: {}})
    (cell,) = result.cells
    assert (cell.status, cell.best) == ("failed", 0)
    assert cell.reason.startswith("M=1: ")
    assert "outputs are outside the tolerance" in cell.reason
    assert [t.passed for t in cell.tried] == [True, False, True]
    assert cell.tried[1].us == {}
    assert tune.says_no(result)
    (first,) = tuned(tunable, "faulty_first").cells
    assert (first.status, first.best) == ("failed", None)
    assert first.reason.startswith("the model's first setting: M=1: ")


def test_an_arm_that_is_exact_to_another_is_held_to_its_first_bits(tunable: Registry) -> None:
    (cell,) = tuned(tunable, "exact").cells
    assert [t.passed for t in cell.tried] == [True, False, True]
    assert cell.reason == "M=1: other bits than the model's first setting"
    (cell,) = tuned(tunable, "not_exact").cells
    assert cell.best is None
    assert cell.reason.startswith("the model's first setting: M=1: ")


def test_weights_that_settings_derive_are_loaded_for_each(tunable: Registry) -> None:
    (cell,) = tuned(tunable, "copied").cells
    assert cell.status == "tuned"
    assert all(t.passed for t in cell.tried)


def test_what_is_skipped_says_why(tunable: Registry) -> None:
    result = tuned(tunable, "tunable", "plain", "pair", "broken", shape=(N, 20))
    assert [(c.arm, c.status, c.reason) for c in result.cells] == [
        ("tunable", "skipped", "layers.0.ffn.gate: tune: ffn.gate = tunable, which is not eligible: K must be a "
         "multiple of 8 (found 20, expected 8, 16, ...)"),
        ("plain", "skipped", "arm plain has no settings"),
        ("pair", "skipped", "arm pair serves ffn.gate+ffn.up in one call: spell shapes N+NxK"),
        ("broken", "skipped", "layers.0.ffn.gate: tune: ffn.gate = broken, which is not eligible: K must be a multiple "
         "of 8 (found 20, expected 8, 16, ...)"),
    ]  # fmt: skip
    assert result.status == "complete"
    (cell,) = tuned(tunable, "broken").cells
    assert cell.status == "skipped"
    assert "lower for M=1 raised ZeroDivisionError: no" in cell.reason


def test_the_clock_on_a_gpu(tunable: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps over one bench share its copies; graphs are closed, and everything that was taken is free again."""
    closed, bound_over, read = [], {}, []

    def rotate(name, bound, *, factor):
        assert factor == 0  # these weights do not outgrow the L2
        bound_over[name] = [b.buffers[t.name] for b in bound for t in b.program.persistent]
        return timing.Timed(
            name, lambda: None, len(bound), None, keep=SimpleNamespace(close=lambda: closed.append(name))
        )

    @contextmanager
    def reader(device, nbytes, *, name):
        read.append(nbytes)
        yield SimpleNamespace(timed=timing.Timed(name, lambda: None, 1, None))

    def measure(device, timed, *, rounds, seed):
        assert rounds == tune_clock.ROUNDS
        names = tuple(t.name for t in timed)
        return SimpleNamespace(names=names, median=lambda name: 1e-6 * (1 + names.index(name)))

    monkeypatch.setattr(timed, "MOST_SETS", 3)
    monkeypatch.setattr(tune_clock, "MOST_SETS", 3)
    monkeypatch.setattr(timing, "rotate", rotate)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(probe, "Reader", reader)
    monkeypatch.setitem(globals(), "Clock", lambda us: tune_clock.by_graphs)
    (cell,) = tuned(tunable, "tunable").cells
    assert (cell.status, cell.best, cell.read_us) == ("tuned", 0, 10.0)
    assert sorted(closed) == sorted(bound_over)
    assert len({tuple(map(id, buffers)) for buffers in bound_over.values()}) == 1
    assert read == [2 * (N * K + K + N)]


def test_the_budget(tunable: Registry) -> None:
    result = tuned(tunable, "tunable", "copied", budget=0.0)
    assert [(c.status, c.reason) for c in result.cells] == [("left", "the budget was spent")] * 2
    assert result.status == "partial"


def test_the_file_keeps_what_was_not_measured(tunable: Registry, tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    us = {32: {1: 4.0, 8: 6.0, 16: 9.0}, 16: {1: 5.0, 8: 5.0, 16: 5.0}, 8: {1: 3.0, 8: 6.0, 16: 12.0}}
    assert tune_table.save(path, TunedFile("h200"), tuned(tunable, "tunable", "plain", us=us)) == 1
    assert tune_table.save(path, tune_table.held(path, "h200"), tuned(tunable, "copied")) == 1
    read = parse_tuned(path.read_text(), path.name, "h200")
    assert [(e.choice.arm, e.choice.setting) for e in read.entries] == [
        ("copied", setting(lanes=32)), ("tunable", setting(lanes=16)),
    ]  # fmt: skip
    old = read.entries[1]
    assert (old.us, old.read_us, old.model_setting) == (((1, 5.0), (8, 5.0), (16, 5.0)), 2.0, setting(lanes=32))
    assert old.model_us == ((1, 4.0), (8, 6.0), (16, 9.0))
    assert (old.run.card, old.run.command, old.run.tools) == ("test", "atlas-lab tune", (("atlas-lab", "0"),))
    before = path.read_text()
    assert tune_table.save(path, read, tuned(tunable, "plain")) == 0
    assert path.read_text() == before


def test_the_result_is_data(tunable: Registry) -> None:
    result = tuned(tunable, "tunable", "plain")
    assert TuneResult.model_validate_json(dumps(result)) == result


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("n", [40, 256, 300, 640])
def test_weights_repeat_their_tile(form: str, n: int) -> None:
    f = FORMATS[form]
    k = 256
    weights = Repeated(f, ("ffn.gate",), (n,), k, seed=3)
    whole, tile = (
        f.dequantize({field: weights.read(t) for field, t in s.projections[0].weight.fields})
        for s in (weights.whole, weights.tile)
    )
    assert whole.shape == (n, k)
    assert np.array_equal(whole, tile[np.arange(n) % weights.rows[0]])
    assert np.isfinite(whole).all()
    assert (whole != 0).mean() > 0.4
    arrays = {field: weights.read(t) for field, t in weights.whole.projections[0].weight.fields}
    f.check(arrays, "whole")
    assert site_of("tune", ("ffn.gate",), f, (n,), k) == weights.whole


def test_shapes() -> None:
    every = shapes_of()
    assert len(set(every)) == len(every)
    assert {(17408, 5120), (5120, 17408), (14336, 4096), (28672, 8192), (21504, 5376), (248320, 5120)} <= set(every)
    assert shapes_of("17408x5120, 64X32,17408x5120") == [(17408, 5120), (64, 32)]
    assert shapes_of("tiny-llama") == [(256, 384), (384, 256), (256, 256), (128, 256), (512, 256)]
    assert shapes_of(PRESETS[0]) == every[: len(shapes_of(PRESETS[0]))]
    assert every[:2] == [(5120, 17408), (17408, 5120)]
    with pytest.raises(
        ConfigError, match=r"^--shapes qwen3.5-9: expected NxK, N\+NxK or one of qwen3.5-27b.*'qwen3.5-9b'"
    ):
        shapes_of("qwen3.5-9")
    with pytest.raises(ConfigError, match=r"^--shapes 0x4: "):
        shapes_of("0x4")


def test_joint_shapes(tunable: Registry) -> None:
    assert shapes_of("17408+17408x5120, 8x16") == [(8, 16)]
    assert joints_of("17408+17408x5120, 8x16") == [Joint((17408, 17408), 5120)]
    roles = ("attn.q", "attn.k", "attn.v")
    assert joints_of("tiny-llama") == [
        Joint((384, 384), 256, ("ffn.gate", "ffn.up")),
        Joint((256, 128, 128), 256, roles),
    ]
    with pytest.raises(ConfigError, match=r"^--shapes 8\+x4: "):
        joints_of("8+x4")

    def shapes(name: str, text: str) -> list[tuple[str, tuple[str, ...], str]]:
        found = jobs(tunable, [name], shapes_of(text), "", joints_of(text))
        return [(j.shape, j.roles, j.skip) for j in found]

    assert shapes("nvfp4_mma_joined", "qwen3.5-27b") == [
        ("17408+17408x5120", ("ffn.gate", "ffn.up"), ""),
        ("10240+6144x5120", ("gdn.qkv", "gdn.z"), ""),
        ("12288+1024+1024x5120", roles, ""),
    ]
    assert shapes("pair", "tiny-llama") == [("384+384x256", ("ffn.gate", "ffn.up"), "")]
    assert shapes("pair", "8+8x16, 8+8+8x16") == [
        ("8+8x16", ("ffn.gate", "ffn.up"), ""),
        ("8+8+8x16", (), "arm pair serves ffn.gate+ffn.up"),
    ]
    assert shapes("tunable", "8+8x16") == [("8+8x16", (), "arm tunable serves *")]
    assert all(len(j.ns) == 1 or "+" in j.arm.roles[0] for j in jobs(tunable, [], [(8, 8)], "", joints_of("8+8x16")))


def test_an_arm_of_several_projections_is_tuned_on_them(tunable: Registry) -> None:
    """Judged on all of them, each of its own values, and kept under the rows of all."""
    us = {32: {1: 4.0, 8: 4.0, 16: 4.0}, 16: {1: 3.0, 8: 3.0, 16: 3.0}, 8: {1: 5.0, 8: 5.0, 16: 5.0}}
    result = tuned(tunable, "pair", "pair_swapped", us=us, joint="16+8x64")
    pair, swapped = result.cells
    assert (pair.status, pair.shape, pair.n, pair.k, pair.legal) == ("tuned", "16+8x64", 24, 64, 3)
    assert [t.passed for t in pair.tried] == [True] * 3
    (entry,) = tune_table.entries(result)
    assert entry.choice == Choice("pair", 24, 64, setting(lanes=16))
    assert (swapped.status, swapped.best) == ("failed", None)
    assert "outputs are outside the tolerance" in swapped.reason


def test_the_setting_of_joined_projections_is_what_they_run_with(tunable: Registry) -> None:
    """What `tune` keeps of a built-in joined arm is what a plan of the same projections asks for."""
    arm = tunable.arm("nvfp4_mma_repacked_joined")
    target = tunable.targets["h200"]
    legal = arm.settings(2 * 17408, 5120, target)
    assert [dict(s)["wide_tiles"] for s in legal] == [2, 1]
    weights = Repeated(FORMATS["nvfp4"], ("ffn.gate", "ffn.up"), (512, 512), 128, seed=1)
    launched = []
    for s in arm.settings(1024, 128, target):
        job = Job(arm, FORMATS["nvfp4"], (512, 512), 128, ("ffn.gate", "ffn.up"))
        with open_device("interpreter", target) as device:
            tuner = tune.Tuner(tunable, Said(), device, Clock(FLAT))
            plan = tune._plan(tuner, job, weights.whole, Table.of([Choice(arm.name, 1024, 128, s)]))
        assert [(x.roles, x.m, x.call.n) for x in plan.steps] == [(job.roles, m, 1024) for m in tune.ROWS]
        launched.append([dict(x.program.launches[0].kernel.spec.parameters)["warps"] for x in plan.steps])
    assert launched == [[dict(s)["warps"]] * 3 for s in arm.settings(1024, 128, target)]
    stale = Table.of([Choice(arm.name, 1024, 128, setting(warps=5))])
    said = r"measure again: atlas-lab tune nvfp4_mma_repacked_joined --shapes N\+Nx128 \(each projection's N, 1024 tog"
    with open_device("interpreter", target) as device, pytest.raises(TuningError, match=said):
        tune._plan(tune.Tuner(tunable, Said(), device, Clock(FLAT)), job, weights.whole, stale)


def test_jobs(tunable: Registry) -> None:
    found = jobs(tunable, [], [(8, 8), (16, 8)])
    assert {j.arm.name for j in found} >= {"tunable", "copied"}
    assert not {"plain"} & {j.arm.name for j in found}
    assert [j.n for j in found] == sorted(j.n for j in found)
    (one,) = jobs(tunable, ["nvfp4_gemv"], [(8, 8)], "nvfp4_ct")
    assert isinstance(one, Job)
    assert (one.format.name, one.skip) == ("nvfp4_ct", "arm nvfp4_gemv has no settings")
    for patterns, form, why in (
        (["nobody"], "", "unknown arm 'nobody'"),
        (["tunable"], "fp9", "--format fp9: expected one of "),
        (["tunable"], "nvfp4", "tune: found no arm that starts from nvfp4, expected one or more"),
    ):
        with pytest.raises(ConfigError, match=f"^{why}"):
            jobs(tunable, patterns, [(8, 8)], form)
