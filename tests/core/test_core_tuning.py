"""Tuned tables: choices, digests, files, and what an arm runs with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from core_fakes import A100, H200, Fake, catalog, context, site
from hypothesis import given
from hypothesis import strategies as st

from atlas_lab.core import tuned_file
from atlas_lab.core.resolve import resolve
from atlas_lab.core.target import shipped_targets
from atlas_lab.core.tuned_file import Measured, Run, TunedFile, parse_tuned, shipped_table
from atlas_lab.core.tuning import Choice, Setting, Table, TuningError, chosen, faults, setting


class Tunable(Fake):
    """Legal are so many warps as the shape allows."""

    def settings(self, n: int, k: int, target: Any) -> tuple[Setting, ...]:
        return tuple(setting(warps=w, rows=2) for w in (8, 4, 2) if n % w == 0)


ARM = Tunable("arm")
ENTRY = Choice("arm", 32, 64, setting(warps=4, rows=2))

settings_ = st.dictionaries(st.sampled_from(["warps", "rows", "splits"]), st.integers(0, 64), min_size=1).map(
    lambda d: setting(**d)
)
choices = st.builds(Choice, st.sampled_from(["a", "b", "ab"]), st.integers(1, 9), st.integers(1, 9), settings_)


def unique(found: list[Choice]) -> list[Choice]:
    return list({(c.arm, c.n, c.k): c for c in found}.values())


@given(st.lists(choices), st.randoms())
def test_a_table_is_its_choices_in_any_order(found: list[Choice], random: Any) -> None:
    found = unique(found)
    one = Table.of(found)
    random.shuffle(found)
    two = Table.of(found)
    assert one == two and hash(one) == hash(two) and one.digest == two.digest
    assert (one.digest == "") == (not found)
    for c in found:
        assert one.find(c.arm, c.n, c.k) == c.setting
    assert one.find("none", 1, 1) is None


@given(st.lists(choices, min_size=1), choices)
def test_another_choice_is_another_digest(found: list[Choice], more: Choice) -> None:
    table = Table.of(unique(found))
    newer = table.merged(Table.of([more]))
    assert newer.find(more.arm, more.n, more.k) == more.setting
    assert (newer.digest == table.digest) == (newer == table)
    assert table.merged(Table()) == table == Table().merged(table)


def test_tables_that_are_none() -> None:
    with pytest.raises(TuningError, match=r"^tuned table: found arm 32x64 twice, expected it once"):
        Table((ENTRY, ENTRY))
    with pytest.raises(TuningError, match="found choices out of order"):
        Table((ENTRY, Choice("a", 1, 1, ENTRY.setting)))
    with pytest.raises(TuningError, match=r"^tuned arm 1x1: found b=1 a=1, expected each parameter once, in the order"):
        Choice("arm", 1, 1, (("b", 1), ("a", 1)))


def test_the_tables_entry_then_the_models_first() -> None:
    assert chosen(ARM, 32, 64, context(table=Table.of([ENTRY]))) == setting(rows=2, warps=4)
    assert chosen(ARM, 64, 64, context(table=Table.of([ENTRY]))) == setting(rows=2, warps=8)
    assert dict(chosen(ARM, 6, 64, context())) == {"rows": 2, "warps": 2}


def test_an_entry_that_the_arm_does_not_know_is_refused() -> None:
    odd = Table.of([Choice("arm", 32, 64, setting(warps=3, rows=2))])
    sentence = (
        "tuned arm 32x64: found rows=2 warps=3, expected one of the arm's 3 settings on h200; measure again: "
        "atlas-lab tune arm --shapes 32x64"
    )
    with pytest.raises(TuningError) as e:
        chosen(ARM, 32, 64, context(table=odd))
    assert str(e.value) == sentence
    assert faults(odd, [ARM], H200) == [sentence]
    assert faults(Table.of([ENTRY]), [ARM], H200) == []
    assert faults(Table.of([ENTRY]), [], H200) == [
        "tuned arm 32x64: found rows=2 warps=4 for an arm that is not installed"
    ]
    with pytest.raises(TuningError, match=r"^tuned arm 7x64: found no settings on a100, expected one or more"):
        chosen(ARM, 7, 64, context(target=A100))
    assert Fake("plain").settings(1, 1, H200) == ()


def test_a_route_knows_its_table() -> None:
    def route(table: Table) -> Any:
        return resolve(site("ffn.up"), context(table=table), catalog(ARM))

    assert route(Table()).assignments == route(Table.of([ENTRY])).assignments
    assert route(Table()).hash != route(Table.of([ENTRY])).hash


RUNS = [Run("NVIDIA H200", "580", (("atlas-lab", "0.1"), ("numba", "0.61")), f"atlas-lab tune {i}", "2026-12-01")
        for i in range(2)]  # fmt: skip


def measured(c: Choice, run: Run = RUNS[0], us: float = 14.25) -> Measured:
    return Measured(c, "nvfp4", ((1, us), (16, 15.0)), 11.8, setting(warps=8), ((1, 15.5), (16, 16.0)), run)


@given(st.lists(choices), st.lists(st.sampled_from(RUNS)))
def test_files_read_back_as_they_were_written(found: list[Choice], runs: list[Run]) -> None:
    made = TunedFile("h200").merged(measured(c, r) for c, r in zip(unique(found), [*runs, *RUNS * 99], strict=False))
    assert parse_tuned(made.text(), "h200.yaml", "h200") == made
    assert made.table == Table.of(e.choice for e in made.entries)


def test_merging_keeps_what_is_not_measured_again() -> None:
    old = TunedFile("h200").merged([measured(ENTRY), measured(Choice("b", 1, 2, ENTRY.setting))])
    new = old.merged([measured(ENTRY, RUNS[1], 9.0)])
    assert [(e.choice.arm, e.us[0][1], e.run.command) for e in new.entries] == [
        ("arm", 9.0, "atlas-lab tune 1"), ("b", 14.25, "atlas-lab tune 0"),
    ]  # fmt: skip
    assert "atlas-lab tune 0" not in old.merged([measured(e.choice, RUNS[1]) for e in old.entries]).text()


TEXT = TunedFile("h200").merged([measured(ENTRY)]).text()
BAD = [
    (("schema: atlas-lab.tuned/1", "schema: atlas-lab.tuned/2"),
     "schema: found 'atlas-lab.tuned/2', expected atlas-lab.tuned/1"),
    (("target: h200", "target: h100"), "target: found 'h100', expected h200"),
    (("target: h200\n", ""), "target: missing"),
    (("target: h200\n", "target: h200\ntargets: x\n"),
     "found 'targets', expected one of schema, target, runs, entries, did you mean 'target'?"),
    (("n: 32", "n: 0"), "entries[0].n: found 0, expected an integer of 1 or more"),
    (("n: 32", "n: true"), "entries[0].n: found True, expected an integer of 1 or more"),
    (("n: 32", "n: 32, m: 1"), "entries[0]: found 'm', expected one of arm, format, n, k, run, setting, us, read_us"),
    (("run: 0", "run: 1"), "entries[0].run: found 1, expected the number of one of 1 runs, from 0"),
    (("read_us: 11.8", "read_us: 0"), "entries[0].read_us: found 0, expected microseconds, more than 0"),
    (("read_us: 11.8", "read_us: .nan"), "entries[0].read_us: found nan, expected microseconds, more than 0"),
    (("read_us: 11.8", f"read_us: 1{400 * '0'}"), "entries[0].read_us: found 1000"),
    (("setting: {rows: 2, warps: 4}", "setting: {}"), "entries[0].setting: found {}, expected a mapping with one key"),
    (("warps: 4", "warps: four"), "entries[0].setting.warps: found 'four', expected an integer of 0 or more"),
    (("us: {1: 14.25", "us: {one: 14.25"), "entries[0].us: found 'one', expected an integer of 1 or more"),
    (("command: atlas-lab tune 0", "command: 3"), "runs[0].command: found 3, expected text"),
    (("entries:\n", "entries: 1\nx:\n"), "found 'x', expected one of"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), BAD, ids=[s for _, s in BAD])
def test_a_file_that_says_what_it_may_not_is_refused(change: tuple[str, str], sentence: str) -> None:
    assert change[0] in TEXT
    with pytest.raises(TuningError) as e:
        parse_tuned(TEXT.replace(*change, 1), "h200.yaml", "h200")
    assert str(e.value).startswith(f"h200.yaml: {sentence}")
    assert "\n" not in str(e.value)


def test_what_is_there_twice() -> None:
    entry = TEXT.splitlines()[-1]
    with pytest.raises(TuningError, match=r"^h200.yaml: entries\[1\]: found arm 32x64 again, expected entries\[0\]"):
        parse_tuned(f"{TEXT}{entry}\n", "h200.yaml", "h200")
    with pytest.raises(TuningError, match=r"^h200.yaml:7: found the key 'n' twice, expected it once"):
        parse_tuned(TEXT.replace("n: 32", "n: 32, n: 32"), "h200.yaml", "h200")
    with pytest.raises(TuningError, match=r"^h200.yaml: found 3, expected a mapping with schema, target"):
        parse_tuned("3", "h200.yaml", "h200")
    with pytest.raises(TuningError, match=r"^h200.yaml:\d: not YAML: "):
        parse_tuned("{", "h200.yaml", "h200")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuned_file, "shipped_path", lambda target: tmp_path / f"{target}.yaml")
    shipped_table.cache_clear()
    yield tmp_path
    shipped_table.cache_clear()


def test_the_package_may_have_a_table_of_a_target(folder: Path) -> None:
    assert shipped_table("h200") == Table()
    shipped_table.cache_clear()
    (folder / "h200.yaml").write_text(TEXT)
    assert shipped_table("h200") == Table.of([ENTRY])
    assert shipped_table("h100") == Table()
    (folder / "b200.yaml").write_text(TEXT)
    with pytest.raises(TuningError, match=r"^b200.yaml: target: found 'h200', expected b200"):
        shipped_table("b200")
    (folder / "a100.yaml").write_bytes(b"\xff")
    with pytest.raises(TuningError, match="found byte 0 that is not UTF-8, expected YAML text"):
        shipped_table("a100")


@pytest.mark.parametrize("target", [t.name for t in shipped_targets()])
def test_the_shipped_tables_can_be_read(target: str) -> None:
    shipped_table(target)
