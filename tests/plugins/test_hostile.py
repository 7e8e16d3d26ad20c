"""What a child process is for: an arm's misdeed costs the check it happens in, and the next check passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas_lab.core.registry import load_registry
from atlas_lab.experiments.case import Case
from atlas_lab.experiments.checks import Check
from atlas_lab.experiments.parity import ParityResult
from atlas_lab.experiments.parity_child import run_isolated
from atlas_lab.experiments.parity_run import Runner

HERE = Path(__file__).parent
KS = (8, 32, 10)  # the misdeed is done from K = 16 on


def three(name: str, device: str, each: float) -> list[ParityResult]:
    checks = [Check("parity", name, Case(name, ("ffn.up",), 1, 40, k, "bf16")) for k in KS]
    found = list(run_isolated(name, checks, ["./hostile.py"], HERE, device=device, each=each))
    assert [c for c, _ in found] == checks
    return [r for _, r in found]


def only_the_second_failed(results: list[ParityResult], words: str) -> None:
    assert [r.ok for r in results] == [True, False, True], [r.sentence for r in results]
    assert words in results[1].sentence
    assert "\n" not in results[1].sentence


@pytest.mark.parametrize(
    ("misdeed", "words"),
    [
        ("write", "write of bytes [1342177280, 1342177282) of global buffer 'layers.0.ffn.up/y', whose size is 80"),
        ("guard", "write of bytes [80, 82) of global buffer 'layers.0.ffn.up/y', whose size is 80"),
        ("spin", "are read but were never written"),
        ("loop", "it had not ended after 3 seconds"),
        ("abort", "died of SIGABRT"),
    ],
)
def test_on_the_interpreter(misdeed: str, words: str) -> None:
    only_the_second_failed(three(f"hostile_{misdeed}", "interpreter", each=3), words)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("misdeed", "words"),
    [
        ("write", "ILLEGAL_ADDRESS"),
        ("guard", "byte 1 after its end was overwritten"),
        ("spin", "it had not ended after 20 seconds"),
        ("abort", "died of SIGABRT"),
    ],
)
def test_on_a_gpu(misdeed: str, words: str) -> None:
    only_the_second_failed(three(f"hostile_{misdeed}", "cuda", each=20), words)


def test_a_child_that_cannot_start_fails_every_check_with_one_sentence() -> None:
    checks = [Check("refusal", "hostile_none"), Check("cases", "hostile_none")]
    results = [r for _, r in run_isolated("hostile_nine", checks, ["./hostile.py"], HERE, device="interpreter")]
    assert len({r.sentence for r in results}) == 1
    assert "unknown arm 'hostile_nine', expected one of" in results[0].sentence
    assert not any(r.ok for r in results)


def test_a_runner_asks_one_child_for_all_of_an_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = load_registry(["./hostile.py"], base=HERE)
    runner = Runner(registry, "cuda", ("./hostile.py",), HERE)
    asked = []

    def here(arm, checks, plugins, base, *, each):
        asked.append(len(checks))
        return [(c, ParityResult(True, c.id)) for c in checks]

    monkeypatch.setattr("atlas_lab.experiments.parity_run.run_isolated", here)
    checks = runner.checks(registry.arm("hostile_none"))
    on_device = [c for c in checks if c.on_device]
    assert [runner.run(c).sentence for c in on_device] == [c.id for c in on_device]
    assert asked == [len(on_device)]
    assert {c.kind for c in checks} - {c.kind for c in on_device} == {"cases", "refusal", "build", "compile"}
