"""Plugins: each is taken in whole or left out whole, with where it came from and a sentence; the others load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest

from atlas_lab.core.registry import PluginError, Registry, load_registry

ARM = """
import atlas_lab
from atlas_lab import Arm, Launch, Rounded, hookimpl, rows
from atlas_lab.kernels import lang as L

@L.kernel
def k(x: L.In[L.bf16], y: L.Out[L.bf16]):
    pass

class One(Arm):
    name, roles, rows, source, kernels, tolerance = {name!r}, ("ffn.*",), rows(1), "bf16", (k,), Rounded("f32", "bf16")
    def finalize(self, p, ctx):
        return []
    def lower(self, call):
        return []
"""
HOOK = "@hookimpl\ndef atlas_arms():\n    return [One()]\n"


class Site:
    """A directory of distributions, each with one module and one entry point."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, dist: str, body: str, *, name: str = "", version: str = "1.0", point: str = "main") -> Path:
        module = f"plug_{dist.replace('-', '_')}"
        file = self.path / f"{module}.py"
        file.write_text(ARM.format(name=name or dist) + body)
        info = self.path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[atlas_lab]\n{point} = {module}\n")
        return file

    def points(self) -> list[EntryPoint]:
        return [e for d in distributions(path=[str(self.path)]) for e in d.entry_points if e.group == "atlas_lab"]

    def load(self, *plugins: str) -> Registry:
        return load_registry(plugins, base=self.path, installed=self.points())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(tmp_path)
    yield Site(tmp_path)
    for name in [n for n in sys.modules if n.startswith("plug_")]:
        del sys.modules[name]


BROKEN = {
    "raises at import": ("1 / 0\n", "ZeroDivisionError: division by zero ({file}:{line})"),
    "exits at import": ("import sys; sys.exit('goodbye')\n", "SystemExit: goodbye ({file}:{line})"),
    "does not parse": ("def f(:\n", "SyntaxError: invalid syntax ({name}, line {line})"),
    "misses a module": ("import no_such_thing\n", "ModuleNotFoundError: No module named 'no_such_thing' ("),
    "raises in a hook": ("@hookimpl\ndef atlas_arms(): raise KeyError('x')\n", "KeyError: 'x' ({file}:{after})"),
    "raises in a later hook": (
        HOOK + "@hookimpl\ndef atlas_targets():\n    yield from [open('/no/such/file')]\n",
        "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file' ({file}:",
    ),
    "returns nothing": ("@hookimpl\ndef atlas_arms(): pass\n", "TypeError: atlas_arms returned None, expected an"),
    "returns one arm": ("@hookimpl\ndef atlas_arms(): return One()\n", "TypeError: atlas_arms returned <arm bad>, "),
    "returns text": ("@hookimpl\ndef atlas_arms(): return 'arm'\n", "TypeError: atlas_arms returned 'arm', expected"),
    "returns a class": ("@hookimpl\ndef atlas_arms(): return [One]\n", "TypeError: atlas_arms returned <class 'plug"),
    "returns formats as arms": (
        "@hookimpl\ndef atlas_arms(): return ['bf16']\n",
        "TypeError: atlas_arms returned 'bf16', expected instances of Arm",
    ),
    "returns arms as targets": (
        "@hookimpl\ndef atlas_targets(): return [One()]\n",
        "TypeError: atlas_targets returned <arm bad>, expected instances of Target",
    ),
    "has no name": ("One.name = ''\n" + HOOK, "TypeError: atlas_arms: <arm > has name '', expected a name"),
    "roles is text": ("One.roles = 'ffn.*'\n" + HOOK, "TypeError: arm bad: roles is 'ffn.*', expected a tuple of role"),
    "rows is a number": ("One.rows = 1\n" + HOOK, "TypeError: arm bad: rows is 1, expected rows(first, last)"),
    "rows is missing": ("del One.rows\n" + HOOK, "TypeError: arm bad: rows is None, expected rows(first, last)"),
    "rows raises": ("One.rows = property(lambda s: 1 / 0)\n" + HOOK, "ZeroDivisionError: division by zero ("),
    "no kernels": ("One.kernels = ()\n" + HOOK, "TypeError: arm bad: kernels is (), expected a tuple of kernels"),
    "functions as kernels": ("One.kernels = (k.function,)\n" + HOOK, "TypeError: arm bad: kernels is (<function k"),
    "tolerance is a number": ("One.tolerance = 1e-3\n" + HOOK, "TypeError: arm bad: tolerance is 0.001, expected"),
    "accuracy is a number": ("One.accuracy = 38\n" + HOOK, "TypeError: arm bad: accuracy is 38, expected"),
    "activation is missing": ("One.activation = None\n" + HOOK, "TypeError: arm bad: activation is None, expected"),
    "reduction class is text": ("One.reduction_class = 'x'\n" + HOOK, "TypeError: arm bad: reduction_class is 'x',"),
    "reads is text": ("One.reads = 'fp8_groups'\n" + HOOK, "TypeError: arm bad: reads is 'fp8_groups', expected a tup"),
    "quantizes is text": ("One.quantizes = 'x'\n" + HOOK, "TypeError: arm bad: quantizes is 'x', expected a tuple of"),
    "prologues is text": ("One.prologues = 'silu'\n" + HOOK, "TypeError: arm bad: prologues is 'silu', expected a tup"),
    "optional kernels are functions": (
        "One.optional_kernels = (k.function,)\n" + HOOK,
        "TypeError: arm bad: optional_kernels is (<function k",
    ),
    "quantized beside a reference": (
        "One.reference = One.quantized = print\n" + HOOK,
        "TypeError: arm bad: quantized is <b",
    ),
    "lower is missing": ("One.lower = None\n" + HOOK, "TypeError: arm bad: lower is None, expected a method"),
    "taken name": (HOOK.replace("One()", "One(), One()"), "ValueError: atlas_arms: the name 'bad' is taken by bad"),
    "unknown hook": ("@hookimpl\ndef atlas_armz(): return []\n", "PluginValidationError: unknown hook 'atlas_armz' in"),
    "wrong arguments": (
        "@hookimpl\ndef atlas_arms(registry): return []\n",
        "PluginValidationError: Plugin 'bad:main:{file}' for hook 'atlas_arms' hookimpl definition: "
        "atlas_arms(registry) Argument(s) {{'registry'}} are declared in the hookimpl but can not be found in the",
    ),
    "unmarked": ("def atlas_arms(): return [One()]\n", "TypeError: atlas_arms is not marked, expected @atlas_lab."),
    "no hooks": ("", "TypeError: it implements no hook, expected one or more of atlas_arms, atlas_formats, "),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_a_row_and_the_others_load(site: Site, case: str) -> None:
    body, sentence = BROKEN[case]
    site.add("alpha", HOOK)
    file = site.add("bad", body, version="0.3")
    site.add("zulu", HOOK)
    registry = site.load()
    assert [e.arm.name for e in registry.entries] == ["alpha", "zulu"]
    assert [p.distribution for p in registry.plugins] == ["alpha", "zulu"]
    (fault,) = registry.faults
    line = ARM.count("\n") + 1
    assert (fault.plugin.name, fault.plugin.distribution, fault.plugin.version) == ("main", "bad", "0.3")
    assert fault.sentence.startswith(sentence.format(file=file, name=file.name, line=line, after=line + 1))
    assert "\n" not in fault.sentence
    assert str(file) in (fault.plugin.where, *fault.sentence.replace("(", " ").replace(":", " ").split()) or (
        fault.plugin.where == file.stem
    )


@pytest.mark.parametrize("case", BROKEN)
def test_it_stops_a_run_that_names_it(site: Site, case: str) -> None:
    body, sentence = BROKEN[case]
    file = site.add("bad", body, point="bad_point")
    line = ARM.count("\n") + 1
    said = sentence.format(file=file, name=file.name, line=line, after=line + 1).split(" 'bad:main")[0]
    for name in ("bad_point", "plug_bad"):
        with pytest.raises(PluginError) as e:
            site.load(name)
        assert str(e.value).startswith(f"plugin {name}: {said}")
    if "taken by" not in said and "plug_bad" not in said:
        with pytest.raises(PluginError) as e:
            load_registry(["./plug_bad.py"], base=site.path, installed=[])
        assert str(e.value).startswith(f"plugin ./plug_bad.py: {said}")


def test_what_is_recorded_of_a_plugin(site: Site) -> None:
    file = site.add("somebody-s", HOOK, name="theirs", version="2.5", point="kernels")
    registry = site.load()
    (plugin,) = registry.plugins
    assert (plugin.name, plugin.distribution, plugin.version) == ("kernels", "somebody-s", "2.5")
    assert plugin.where == str(file)
    (entry,) = registry.entries
    assert (entry.distribution, entry.version, entry.where) == ("somebody-s", "2.5", str(file))
    assert not entry.built_in
    assert not entry.default
    assert registry.arm("theirs") is entry.arm
    with pytest.raises(PluginError, match="unknown arm 'their', expected one of theirs, did you mean 'theirs'"):
        registry.arm("their")


def test_built_in_comes_first_and_the_rest_by_distribution_and_name(site: Site) -> None:
    for dist in ("zulu", "atlas-lab", "Alpha", "beta"):
        site.add(dist, HOOK)
    registry = site.load()
    assert [e.arm.name for e in registry.entries] == ["atlas-lab", "Alpha", "beta", "zulu"]
    assert [e.built_in for e in registry.entries] == [True, False, False, False]


def test_a_taken_name_leaves_the_later_one_out_whole(site: Site) -> None:
    site.add("alpha", HOOK, name="same")
    site.add(
        "beta", HOOK.replace("[One()]", "[Other(), One()]").replace("@hook", "class Other(One): name = 'o'\n@hook")
    )
    site.add("gamma", HOOK, name="same")
    (site.path / "plug_beta.py").write_text((site.path / "plug_beta.py").read_text().replace("'beta'", "'same'"))
    registry = site.load()
    assert [e.arm.name for e in registry.entries] == ["same"]
    assert [f.plugin.distribution for f in registry.faults] == ["beta", "gamma"]
    assert registry.faults[0].sentence == "ValueError: atlas_arms: the name 'same' is taken by alpha"


def test_blocking(site: Site) -> None:
    site.add("alpha", HOOK, point="one")
    site.add("beta", "1 / 0\n", point="two")
    assert [e.arm.name for e in site.load("-one").entries] == []
    assert site.load("-two").faults == []
    with pytest.raises(PluginError, match="plugins: -three is not installed, expected one of one, two"):
        site.load("-three")


def test_named_plugins_are_files_modules_or_installed_ones(site: Site) -> None:
    site.add("alpha", HOOK, point="one")
    (site.path / "plug_file.py").write_text(ARM.format(name="file") + HOOK)
    (site.path / "plug_module.py").write_text(ARM.format(name="module") + HOOK)
    registry = site.load("./plug_file.py", "plug_module", "one", "plug_alpha", "./plug_file.py")
    assert [e.arm.name for e in registry.entries] == ["alpha", "file", "module"]
    assert [p.distribution for p in registry.plugins] == ["alpha", "", ""]
    with pytest.raises(PluginError) as e:
        site.load("./plug_none.py")
    assert str(e.value) == f"plugin ./plug_none.py: FileNotFoundError: {site.path}/plug_none.py is not a file"
    with pytest.raises(
        PluginError, match="plugin no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    ):
        site.load("no_such_module")


def test_one_module_under_two_entry_points_is_taken_in_once(site: Site) -> None:
    site.add("alpha", HOOK)
    info = site.path / "alpha-1.0.dist-info" / "entry_points.txt"
    info.write_text("[atlas_lab]\none = plug_alpha\ntwo = plug_alpha\n")
    registry = site.load()
    assert [e.arm.name for e in registry.entries] == ["alpha"]
    assert registry.faults == []


def test_two_distributions_may_call_their_entry_point_the_same(site: Site) -> None:
    site.add("alpha", HOOK, point="arms")
    site.add("beta", HOOK, point="arms")
    registry = site.load()
    assert [e.arm.name for e in registry.entries] == ["alpha", "beta"]


def test_installed_plugins_are_found_without_being_told(site: Site) -> None:
    site.add("alpha", HOOK)
    registry = load_registry()
    assert "alpha" in [e.arm.name for e in registry.entries]
    assert registry.arm("alpha") in [e.arm for e in registry.entries if not e.built_in]


def test_targets_models_and_formats(site: Site) -> None:
    site.add(
        "alpha",
        """
from dataclasses import replace
from atlas_lab.core.target import shipped_targets
from atlas_lab.formats import FORMATS
class Family:
    family = "mine"
class Odd(type(FORMATS["bf16"])):
    name = "odd"
@hookimpl
def atlas_targets():
    yield replace(shipped_targets()[0], name="mine")
@hookimpl
def atlas_models():
    return (Family(),)
@hookimpl
def atlas_formats():
    return {Odd(): None}
""",
    )
    registry = site.load()
    assert registry.faults == []
    assert (list(registry.targets), list(registry.models), list(registry.formats)) == (["mine"], ["mine"], ["odd"])
    with pytest.raises(PluginError, match="unknown target 'nine', expected one of mine, did you mean 'mine'"):
        registry.target("nine")
