"""Result files: round trip, numbers that JSON lacks, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atlas_lab.experiments import results
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.results import (
    AbResult,
    AccuracyResult,
    Cell,
    Comparison,
    Dimensions,
    ExperimentResult,
    LaunchResult,
    ParityResult,
    Residency,
    TimeResult,
    VariantResult,
)


def whole() -> AbResult:
    cell = Cell(
        variant="nvfp4",
        layer=0,
        role="ffn.gate",
        m=1,
        arm="nvfp4_gemv",
        status="passed",
        dims=Dimensions(n=17408, k=5120, numbers_n=384, numbers_k=256),
        bytes=50_000_000,
        flops=178_257_920,
        launches=[
            LaunchResult(
                kernel="gemv__1",
                grid=(1, 1, 1),
                block=(128, 1, 1),
                shared=0,
                pipe="fma",
                flops=3,
                bytes=4,
                registers=40,
            )
        ],
        parity=ParityResult(passed=True, worst=0.2),
        accuracy=AccuracyResult(rel_l2=0.1, cosine=0.99, snr_db=20.5),
        floor_us=11.8,
        time=TimeResult(median_us=16.0, ci95=(15.9, 16.1), blocks=[16.0] * 5, floor_us=11.9, share=0.74),
    )
    x = ExperimentResult(
        name="ffn",
        config={"m": [1]},
        variants={
            "nvfp4": VariantResult(
                weights="nvfp4",
                levers={"graph": True},
                routes=[],
                residency=Residency(steady=1, peak=2, labels={"a": 1}),
            )
        },
        cells=[cell],
        comparisons=[Comparison(a="bf16", b="nvfp4", m=1, ratio=0.3, ci95=(0.29, 0.31), verdict="faster")],
    )
    return AbResult(status="complete", tool={"version": "0"}, seed=1, experiments=[x])


def test_round_trip(tmp_path: Path):
    path = tmp_path / "r.json"
    results.write(path, results.dumps(whole()))
    assert results.read_ab(path) == whole()
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_keys_of_the_schema():
    data = json.loads(results.dumps(whole()))
    assert data["schema"] == "atlas-lab.ab/1"
    assert set(data) == {"schema", "status", "tool", "machine", "device", "target", "seed", "settings", "experiments"}
    x = data["experiments"][0]
    assert {"name", "config", "variants", "cells", "comparisons"} <= set(x)
    assert set(x["variants"]["nvfp4"]["residency"]) == {"steady", "peak", "labels"}
    assert {
        *("variant", "layer", "role", "m", "arm", "dims", "launches", "parity", "accuracy", "floor_us", "time")
    } <= set(x["cells"][0])
    assert {"rel_l2", "cosine", "snr_db"} <= set(x["cells"][0]["accuracy"])
    assert {"a", "b", "m", "ratio", "ci95", "verdict", "reason"} <= set(x["comparisons"][0])


def test_numbers_that_json_lacks_are_null_with_a_reason():
    accuracy = AccuracyResult(rel_l2=0.0, cosine=float("nan"), snr_db=float("inf"))
    data = json.loads(results.dumps(accuracy))
    assert data["snr_db"] is None
    assert data["cosine"] is None
    assert data["reasons"] == {"cosine": "not a number", "snr_db": "infinite"}
    assert "reasons" not in json.loads(results.dumps(AccuracyResult(rel_l2=0.1, cosine=1.0, snr_db=3.0)))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "r.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        results.write(path, "\ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_refusals(tmp_path: Path):
    with pytest.raises(ConfigError, match="found a directory, expected a file's path"):
        results.writable(tmp_path)
    with pytest.raises(ConfigError, match="found no directory"):
        results.writable(tmp_path / "none" / "r.json")
    results.writable(tmp_path / "r.json")
    (tmp_path / "x.json").write_text('{"schema": "other/1"}')
    with pytest.raises(ConfigError, match=r"x\.json: no result of schema atlas-lab\.ab/1"):
        results.read_ab(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        results.read_ab(tmp_path / "none.json")
