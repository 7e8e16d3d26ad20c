"""The suite as a stranger meets it: with and without the plugin, with bad options, with and without a compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from atlas_lab.runtime.driver import missing_gpu

PLUGINS = Path(__file__).parents[1] / "plugins"
WITH_PLUGIN = ("-p", "atlas_lab.testing")
SUITE = (*WITH_PLUGIN, "--pyargs", "atlas_lab.testing.suite")
FAST = ("-k", "refusal or m1-n1-k4 or cases or arms or compile")


@pytest.fixture
def stranger(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A directory with the example, and nothing of ours in the environment."""
    monkeypatch.delenv("CI", raising=False)
    shutil.copy(PLUGINS / "int8_row.py", pytester.path)
    # under another name: pytest imports a test file once in a process
    shutil.copy(PLUGINS / "test_int8_row.py", pytester.path / "test_mine.py")
    return pytester


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "the CUDA compiler cannot be loaded; install it with: pip install x"
    monkeypatch.setattr("atlas_lab.experiments.checks.compiler_missing", lambda: said)


@pytest.mark.usefixtures("no_compiler")
def test_the_example_passes_without_the_plugin(stranger: pytest.Pytester) -> None:
    result = stranger.runpytest("test_mine.py", "-v", *FAST)
    result.assert_outcomes(passed=3, skipped=3, deselected=10)
    result.stdout.fnmatch_lines(
        [
            "*::TestInt8Row::test_arm[[]int8_row_gemv-cases] PASSED*",
            "*::TestInt8Row::test_arm[[]int8_row_gemv-parity-bf16-attn_q-m1-n1-k4] PASSED*",
            "*::TestInt8Row::test_arm[[]int8_row_gemv-refusal] PASSED*",
            "*::TestInt8Row::test_arm[[]int8_row_gemv-compile-sm_80] SKIPPED*",
        ]
    )


@pytest.mark.usefixtures("no_compiler")
def test_a_missing_compiler_is_a_skip_with_its_reason(stranger: pytest.Pytester) -> None:
    result = stranger.runpytest(*WITH_PLUGIN, "test_mine.py", "-q", "-k", "compile")
    result.assert_outcomes(skipped=3, deselected=13)
    result.stdout.fnmatch_lines(["SKIPPED [[]3]*the CUDA compiler cannot be loaded; install it with: pip install x"])


@pytest.mark.usefixtures("no_compiler")
def test_and_a_failure_in_ci(stranger: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    result = stranger.runpytest("test_mine.py", "-k", "compile")
    result.assert_outcomes(failed=3, deselected=13)
    result.stdout.fnmatch_lines(["*compile-sm_80: the CUDA compiler cannot be loaded; install it with: pip install x"])


def test_a_plugin_is_found_beside_the_calling_file(stranger: pytest.Pytester) -> None:
    inner = stranger.mkdir("inner")
    for name in ("int8_row.py", "test_mine.py"):
        shutil.move(stranger.path / name, inner / name)
    stranger.runpytest("inner/test_mine.py", "-k", "refusal").assert_outcomes(passed=1, deselected=15)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            '"int8_rowgemv", plugin="./int8_row.py"',
            "no arm is called 'int8_rowgemv', found *did you mean 'int8_row_gemv'?",
        ),
        ('"int9_*", plugin="./int8_row.py"', "no arm is called 'int9_[*]', found *int8_row_gemv*"),
        ('"int8_row_gemv"', "no arm is called 'int8_row_gemv', found bf16_gemv,*"),
        ('"x", plugin="./none.py"', "plugin ./none.py: FileNotFoundError: */none.py is not a file"),
        ('"x", plugin="./broken.py"', "plugin ./broken.py: ZeroDivisionError: division by zero (*broken.py:1)"),
    ],
)
def test_an_arm_that_is_not_there_is_a_failure(stranger: pytest.Pytester, call: str, sentence: str) -> None:
    stranger.makepyfile(
        broken="1 / 0", test_it=f"from atlas_lab.testing import parity_suite\nT = parity_suite({call})\n"
    )
    stranger.path.joinpath("test_it.py").write_text(
        f"from atlas_lab.testing import parity_suite\nTestIt = parity_suite({call})\n"
    )
    result = stranger.runpytest("test_it.py")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([sentence])


def test_an_arm_that_serves_nothing_is_a_failure(stranger: pytest.Pytester) -> None:
    text = (stranger.path / "int8_row.py").read_text()
    (stranger.path / "int8_row.py").write_text(text.replace("if p.k % 4:", "if p.k:"))
    result = stranger.runpytest("test_mine.py", "-k", "not compile")
    result.assert_outcomes(failed=1, passed=1, deselected=3)
    result.stdout.fnmatch_lines(
        ["*-cases: arm int8_row_gemv says yes to none of the shapes tried for ffn.gate; of N=256*"]
    )


def test_a_wrong_kernel_fails_with_one_sentence(stranger: pytest.Pytester) -> None:
    text = (stranger.path / "int8_row.py").read_text()
    (stranger.path / "int8_row.py").write_text(text.replace("L.s8(q, 3)", "L.s8(q, 2)"))
    result = stranger.runpytest("test_mine.py", "-k", "m1-n1-k4")
    result.assert_outcomes(failed=1, deselected=15)
    result.stdout.fnmatch_lines(
        ["int8_row_gemv on bf16 attn.q, M=1, N=1, K=4 (smallest N and K): 1 of 1 outputs are out*"]
    )


def test_the_suite_for_arms_named_on_the_command_line(stranger: pytest.Pytester) -> None:
    named = ("--plugin", "./int8_row.py", "--arm", "int8_row_gemv")
    result = stranger.runpytest(*SUITE, *named, "-k", "refusal or m1-n1-k4")
    result.assert_outcomes(passed=2, deselected=14)
    of_plugin = stranger.runpytest(*SUITE, "--plugin", "./int8_row.py", "--collect-only", "-q")
    of_plugin.stdout.fnmatch_lines(["*::TestArms::test_arm[[]int8_row_gemv-cases]"])
    of_plugin.stdout.no_fnmatch_line("*bf16_gemv*")
    built_in = stranger.runpytest(*SUITE, "--arm", "bf16_gemv", "--arm", "fp8_gemv", "--collect-only", "-q")
    built_in.stdout.fnmatch_lines(["*[[]bf16_gemv-cases]", "*[[]fp8_gemv-cases]"])
    wrong = stranger.runpytest(*SUITE, "--arm", "int8")
    wrong.assert_outcomes(failed=1)
    wrong.stdout.fnmatch_lines(["no arm is called 'int8', found *"])


def test_a_device_that_is_not_there_is_a_sentence(stranger: pytest.Pytester) -> None:
    wrong = stranger.runpytest(*WITH_PLUGIN, "--device", "gpu", "test_mine.py")
    assert wrong.ret == pytest.ExitCode.USAGE_ERROR
    if missing_gpu():
        result = stranger.runpytest(*WITH_PLUGIN, "--device=cuda", "test_mine.py")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: {missing_gpu()}"])


def test_tests_marked_gpu_are_skipped_and_say_so(stranger: pytest.Pytester) -> None:
    stranger.makepyfile(test_gpu="import pytest\n@pytest.mark.gpu\ndef test_it(): assert False\n")
    result = stranger.runpytest(*WITH_PLUGIN, "--strict-markers", "test_gpu.py", "-q")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED [[]1]*needs --device=cuda"])
