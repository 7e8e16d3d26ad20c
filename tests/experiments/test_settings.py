"""Levers, pins and orders: who wins, what is refused and where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas_lab.core.rows import rows, rows_from
from atlas_lab.experiments import config, settings
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.settings import Said
from atlas_lab.experiments.yaml_source import parse

HEAD = "experiments:\n  x:\n    model: {family: qwen3.5, hidden: 64, intermediate: 96}\n    m: [1]\n    baseline: a\n"


def loaded(text: str) -> config.Loaded:
    return config.check(parse(text, "r.yaml", Path("r.yaml")))


def with_variant(variant: str, more: str = "") -> config.Loaded:
    return loaded(HEAD + f"    variants: {{a: {variant}}}\n" + more)


def test_precedence_of_levers(registry):
    h200 = registry.targets["h200"]
    file = with_variant("{levers: {graph: off}}", "levers: {graph: true, stream_weights: off}\n")
    variant = file.config.experiments["x"].variants["a"]
    off = {"graph": "0"}

    def levers(said: Said, v: config.Variant | None = None) -> tuple[bool, str]:
        found = settings.levers_for(file, said, h200, v)
        return found.graph, found.origin("graph")

    assert levers(Said()) == (True, "yaml")
    assert levers(Said(environment={"ATLAS_LAB_GRAPH": "off"})) == (False, "environment")
    assert levers(Said(sets={"graph": "1"}, environment={"ATLAS_LAB_GRAPH": "off"})) == (True, "--set")
    assert levers(Said(sets=off), variant) == (False, "variant")
    assert settings.levers_for(None, Said(), h200).origin("graph") == "default"


def test_precedence_of_orders_and_pins():
    file = with_variant(
        "{pins: {'ffn.*': v, ffn.up: {arm: u, rows: few}}, arms: {'ffn.*': [one], ffn.down: {decode: [two]}}}",
        "pins: {'ffn.*': b, layers.3.ffn.down: {arm: c, rows: [2, 4]}}\narms: {'*': [three]}\n",
    )
    p = settings.preferences_for(file, "a", file.config.experiments["x"].variants["a"])
    pins = {(pin.layer, pin.pattern): (pin.arm, pin.rows) for pin in p.pins}
    assert pins == {
        (None, "ffn.*"): ("v", None),
        (3, "ffn.down"): ("c", rows(2, 4)),
        (None, "ffn.up"): ("u", rows(2, 16)),
    }
    assert [(o.pattern, o.rows, o.arms, o.origin) for o in p.orders] == [
        ("ffn.down", rows(1), ("two",), "arms of variant a"),
        ("ffn.*", rows_from(1), ("one",), "arms of variant a"),
        ("*", rows_from(1), ("three",), "arms"),
    ]
    assert [o.origin for o in settings.preferences_for(file).orders] == ["arms"]


@pytest.mark.parametrize(
    ("variant", "more", "sentence"),
    [
        ("{levers: {grahp: on}}", "", "r.yaml:6: experiments.x.variants.a.levers.grahp: unknown lever 'grahp', "
         "expected one of stream_weights, graph, row_invariant, gated, pdl, lora, did you mean 'graph'?"),
        ("{}", "levers: {graph: maybe}\n", "r.yaml:7: levers.graph: lever graph: found 'maybe', expected 0, false, "
         "off, 1, true or on"),
        ("{weights: nvfp5}", "", "r.yaml:6: experiments.x.variants.a.weights: unknown format 'nvfp5', expected one of "
         "bf16, fp8, fp8_tensor, fp8_row, nvfp4, nvfp4_ct, q8_0, q4_k, q6_k, q2_0_g64, q2_0_g128, block_nvfp4, "
         "did you mean 'nvfp4'?"),
        ("{}", "target: h20\n", "r.yaml:7: target: unknown target 'h20', expected one of h200, h100, a100, gb10, "
         "rtx5090, b200, did you mean 'h200'?"),
        ("{pins: {layers.x.ffn.up: toy}}", "", "r.yaml:6: experiments.x.variants.a.pins['layers.x.ffn.up']: found "
         "'layers.x.ffn.up', expected layers.NUMBER.ROLE"),
    ],
)  # fmt: skip
def test_refusals(registry, variant, more, sentence):
    with pytest.raises(ConfigError) as e:
        settings.check_names(with_variant(variant, more), registry)
    assert str(e.value) == sentence


@pytest.mark.parametrize(
    ("variant", "where"),
    [
        ("{pins: {'ffn.*': toy_gird}}", "pins['ffn.*']"),
        ("{arms: {'ffn.*': [toy, toy_gird]}}", "arms['ffn.*'][1]"),
        ("{arms: {'ffn.*': {few: [toy_gird]}}}", "arms['ffn.*'].few[0]"),
    ],
)
def test_unknown_arms(registry, variant, where):
    with pytest.raises(ConfigError) as e:
        settings.check_names(with_variant(variant), registry)
    assert str(e.value).startswith(f"r.yaml:6: experiments.x.variants.a.{where}: unknown arm 'toy_gird', expected one")
    assert str(e.value).endswith(", did you mean 'toy_grid'?")


def test_names_that_exist_pass(registry):
    settings.check_names(with_variant("{weights: fp8, pins: {ffn.up: toy}, arms: {'*': [toy_grid]}}"), registry)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (["graph"], "--set graph: found no =, expected name=value"),
        (["grahp=1"], "--set grahp=1: unknown lever 'grahp', expected one of stream_weights, graph, row_invariant, "
         "gated, pdl, lora, did you mean 'graph'?"),
        (["graph=2"], "--set graph=2: lever graph: found '2', expected 0, false, off, 1, true or on"),
    ],
)  # fmt: skip
def test_sets(values, sentence):
    with pytest.raises(ConfigError) as e:
        settings.parse_sets(values)
    assert str(e.value) == sentence
    assert settings.parse_sets(["graph=off"]) == {"graph": "off"}


def test_environment(registry):
    with pytest.raises(ConfigError) as e:
        settings.levers_for(None, Said(environment={"ATLAS_LAB_GRAHP": "1", "HOME": "x"}), registry.targets["h200"])
    assert str(e.value).startswith("environment: ATLAS_LAB_GRAHP: unknown lever 'grahp'")


def test_plugins_that_fail_are_named(tmp_path: Path):
    (tmp_path / "bad.py").write_text("raise RuntimeError('no luck')\n")
    (tmp_path / "r.yaml").write_text("plugins: [./bad.py]\n" + HEAD + "    variants: {a: {}}\n")
    file = config.load(tmp_path / "r.yaml")
    with pytest.raises(ConfigError) as e:
        settings.registry_for(file)
    assert str(e.value).startswith(f"{tmp_path}/r.yaml:1: plugins[0]: plugin ./bad.py: RuntimeError: no luck (")
    with pytest.raises(ConfigError) as e:
        settings.registry_for(None, [str(tmp_path / "bad.py")])
    assert str(e.value).startswith(f"--plugin: plugin {tmp_path}/bad.py: RuntimeError: no luck (")
    with pytest.raises(ConfigError, match="--plugin: plugin nowhere: ModuleNotFoundError: No module named 'nowhere'"):
        settings.registry_for(None, ["nowhere"])
    with pytest.raises(ConfigError, match=r"--plugin: plugins: -nobody is not installed, expected one of"):
        settings.registry_for(None, ["-nobody"])


def test_a_named_plugin_is_relative_to_its_file(tmp_path: Path):
    toys = Path(__file__).parent / "toy_arms.py"
    (tmp_path / "mine.py").write_text(toys.read_text())
    (tmp_path / "r.yaml").write_text("plugins: [./mine.py]\n" + HEAD + "    variants: {a: {}}\n")
    assert settings.registry_for(config.load(tmp_path / "r.yaml")).arm("toy").name == "toy"
