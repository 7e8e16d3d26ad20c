"""registry.yaml: the example as it is, every refusal's sentence with its line, which file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas_lab.core.rows import Rows, rows
from atlas_lab.experiments import config
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.yaml_source import parse

EXAMPLE = """\
plugins: [./int8_row.py]         # relative to this file; an installed package needs no line
experiments:
  int8-decode:
    model: {family: qwen3.5, hidden: 5120, intermediate: 17408, seed: 1}   # or  checkpoint: PATH (BF16)
    interpreter: {hidden: 256, intermediate: 384}   # numbers there; plan, bytes, floors stay at full size
    layers: [0]
    roles: [ffn.gate, ffn.up, ffn.down]
    m: [1]
    baseline: bf16
    variants:
      bf16:  {weights: bf16}
      int8:  {weights: bf16, pins: {"ffn.*": int8_row_gemv}}
      nvfp4: {weights: nvfp4}                       # converted from the same BF16 weights
    require:
      int8: {max_time_ratio: 0.65, min_snr_db: 38}  # else exit 1; time is skipped in the interpreter
"""


def check(text: str) -> config.Loaded:
    return config.check(parse(text, "registry.yaml", Path("registry.yaml")))


def replaced(old: str, new: str) -> str:
    assert old in EXAMPLE
    return EXAMPLE.replace(old, new)


def test_the_example_as_it_is():
    name, x = check(EXAMPLE).experiment(None)
    assert name == "int8-decode"
    assert x.m == [1]
    assert x.variants["int8"].pins["ffn.*"].arm == "int8_row_gemv"
    assert x.require["int8"].max_time_ratio == 0.65


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("m: [1]", "m: [1, 3, 0]", "8: experiments.int8-decode.m[2]: found 0, expected an integer of 1 or more"),
        ("m: [1]", "m: [1.5]", "8: experiments.int8-decode.m[0]: found 1.5, expected an integer of 1 or more"),
        ("m: [1]", "m: [yes]", "8: experiments.int8-decode.m[0]: found true, expected an integer of 1 or more"),
        ("m: [1]", "m: [1, 1]", "8: experiments.int8-decode.m[1]: found 1 twice, expected each once"),
        ("m: [1]", "m: 1", "8: experiments.int8-decode.m: found 1, expected a list"),
        ("m: [1]", "m: []", "8: experiments.int8-decode.m: found an empty value, expected one entry or more"),
        ("    m: [1]\n", "", "3: experiments.int8-decode: missing key 'm'"),
        ("m: [1]", "M: [1]", "8: experiments.int8-decode.M: unknown key, expected one of model, checkpoint, "
         "interpreter, layers, roles, blocks, m, baseline, variants, require"),
        ("baseline: bf16", "baselin: bf16", "9: experiments.int8-decode.baselin: unknown key, expected one of model, "
         "checkpoint, interpreter, layers, roles, blocks, m, baseline, variants, require, did you mean 'baseline'?"),
        ("baseline: bf16", "baseline: fp16", "9: experiments.int8-decode.baseline: unknown variant 'fp16', expected "
         "one of bf16, int8, nvfp4, did you mean 'bf16'?"),
        ("    layers: [0]", "    m: [3]", "8: experiments.int8-decode.m: duplicate key, first on line 6"),
        ("layers: [0]", "layers: [-1]", "6: experiments.int8-decode.layers[0]: found -1, expected an integer of 0 or "
         "more"),
        ("hidden: 5120", "hidden: big", "4: experiments.int8-decode.model.hidden: found 'big', expected an integer of "
         "1 or more"),
        ("hidden: 5120, ", "", "4: experiments.int8-decode.model: missing key 'hidden', expected it or a preset"),
        ("hidden: 256, ", "", "5: experiments.int8-decode.interpreter: missing key 'hidden'"),
        ("{weights: nvfp4}", "{weights: nvfp4, checkpoint: x}", "13: experiments.int8-decode.variants.nvfp4: found "
         "both weights and checkpoint, expected one of them"),
        ("{weights: nvfp4}", "nvfp4", "13: experiments.int8-decode.variants.nvfp4: found 'nvfp4', expected a mapping"),
        ("{weights: nvfp4}", "{wieghts: nvfp4}", "13: experiments.int8-decode.variants.nvfp4.wieghts: unknown key, "
         "expected one of weights, checkpoint, levers, pins, arms, did you mean 'weights'?"),
        ("int8_row_gemv}}", "[a]}}", "12: experiments.int8-decode.variants.int8.pins['ffn.*']: found a list, expected "
         "an arm's name or a mapping with arm and rows"),
        ("int8_row_gemv}}", "{arm: a, rows: dec}}}", "12: experiments.int8-decode.variants.int8.pins['ffn.*']: found "
         "rows 'dec', expected decode, few, prefill, one M, or [first, last]"),
        ("int8: {max_time_ratio: 0.65", "int9: {max_time_ratio: 0.65", "15: experiments.int8-decode.require.int9: "
         "unknown variant 'int9', expected one of bf16, int8, nvfp4, did you mean 'int8'?"),
        ("max_time_ratio: 0.65", "max_time_ratio: -1", "15: experiments.int8-decode.require.int8.max_time_ratio: "
         "found -1, expected a number above 0"),
        ("min_snr_db: 38", "min_snr_db: .nan", "15: experiments.int8-decode.require.int8.min_snr_db: found nan, "
         "expected a number"),
        ("plugins: [./int8_row.py]", "plugins: ./int8_row.py", "1: plugins: found './int8_row.py', expected a list"),
        ("    model: {family: qwen3.5, hidden: 5120, intermediate: 17408, seed: 1}", "    checkpoint: x\n    model: y",
         "3: experiments.int8-decode: found both of model and checkpoint, expected one of them"),
    ],
)  # fmt: skip
def test_refusals(old, new, sentence):
    with pytest.raises(ConfigError) as e:
        check(replaced(old, new))
    assert str(e.value) == f"registry.yaml:{sentence}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "registry.yaml: found nothing, expected a mapping with the key experiments"),
        ("plugins: []\n", "registry.yaml:1: missing key 'experiments'"),
        ("- a\n", "registry.yaml:1: found a list, expected a mapping"),
        ("experiments: {}\n", "registry.yaml:1: experiments: found an empty value, expected one experiment or more"),
        (
            "experiments: {}\nlever: {}\n",
            "registry.yaml:2: lever: unknown key, expected one of plugins, target, levers, "
            "arms, pins, experiments, did you mean 'levers'?",
        ),
        (
            "experiments: {x: {m: [1], baseline: a, variants: {a: {}}}}\n",
            "registry.yaml:1: experiments.x: found neither of model and checkpoint, expected one of them",
        ),
        (
            "experiments: {x: {model: q, m: [1], baseline: a, variants: {}}}\n",
            "registry.yaml:1: experiments.x.variants: found an empty value, expected one variant or more",
        ),
        (
            "arms: {'ffn.*': {decod: [a]}}\nexperiments: {}\n",
            "registry.yaml:1: arms['ffn.*'].decod: unknown key, expected one of all, decode, few, prefill, "
            "did you mean 'decode'?",
        ),
    ],
)
def test_refusals_of_whole_files(text, sentence):
    with pytest.raises(ConfigError) as e:
        check(text)
    assert str(e.value) == sentence


def test_the_first_wrong_line_is_named():
    text = replaced("m: [1]", "m: [0]").replace("hidden: 5120", "hidden: 0")
    with pytest.raises(ConfigError, match=r"^registry\.yaml:4: experiments\.int8-decode\.model\.hidden"):
        check(text)


def test_short_spellings():
    text = "experiments: {x: {model: qwen3.5-27b, m: [1], baseline: a, variants: {a: {pins: {p: {arm: q, rows: %s}}}}}}"
    for spelled, expected in (("few", rows(2, 16)), ("7", rows(7)), ("[3, 9]", Rows(3, 9))):
        _, x = check(text % spelled).experiment("x")
        assert x.model is not None
        assert x.model.preset == "qwen3.5-27b"
        assert x.variants["a"].pins["p"].range == expected


def test_unknown_experiment():
    with pytest.raises(ConfigError) as e:
        check(EXAMPLE).experiment("int8-decod")
    assert str(e.value) == (
        "registry.yaml: unknown experiment 'int8-decod', expected one of int8-decode, did you mean 'int8-decode'?"
    )


def test_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert config.find()[0] == config.packaged()
    assert config.load().how == "packaged: no ./registry.yaml here"
    (tmp_path / "registry.yaml").write_text(EXAMPLE)
    assert config.load().how == "./registry.yaml"
    assert config.load().base == Path()
    (tmp_path / "other.yaml").write_text(EXAMPLE)
    assert config.load(Path("other.yaml")).how == "-c"
    with pytest.raises(ConfigError, match=r"^none\.yaml: cannot be read: No such file or directory$"):
        config.load(Path("none.yaml"))


def test_the_packaged_copy_is_the_shipped_file():
    assert config.packaged().read_text() == (Path(__file__).parents[2] / "registry.yaml").read_text()
