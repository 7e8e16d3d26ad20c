"""YAML with lines: data as written, duplicates refused, every part found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.yaml_source import parse, read, spell

TEXT = """\
levers: {graph: off}
experiments:
  x:
    m: [1, 3,
        0]
    pins: {"ffn.*": a}
"""


def test_data_and_lines():
    source = parse(TEXT, "r.yaml")
    assert source.data == {
        "levers": {"graph": False},
        "experiments": {"x": {"m": [1, 3, 0], "pins": {"ffn.*": "a"}}},
    }
    assert source.line(("experiments", "x")) == 3
    assert source.line(("experiments", "x", "m", 2)) == 5
    assert source.line(("experiments", "x", "pins", "ffn.*")) == 6
    assert source.line(("experiments", "x", "pins", "nowhere", "at", "all")) == 6


def test_error_names_file_line_and_part():
    error = parse(TEXT, "r.yaml").error(("experiments", "x", "m", 2), "found 0")
    assert str(error) == "r.yaml:5: experiments.x.m[2]: found 0"


def test_spelling_of_keys_with_dots():
    assert spell(("pins", "ffn.*")) == "pins['ffn.*']"
    assert spell(("a", 0, "b")) == "a[0].b"
    assert spell(()) == ""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", "r.yaml:5: b.c: duplicate key, first on line 3"),
        ("a: 1\na: 2\n", "r.yaml:2: a: duplicate key, first on line 1"),
        ("a: [1, 2\nb: 3\n", "r.yaml:2: not YAML: expected ',' or ']', but got ':'"),
        ("a: 1\n\tb: 2\n", "r.yaml:2: not YAML: found character '\\t' that cannot start any token"),
        ("a: &x\n  b: *x\n", "r.yaml:2: a.b: found an alias of what it stands in, expected values"),
        ("? [1, 2]\n: 3\n", "r.yaml:1: found a key on line 1 that is a list or mapping, expected a word"),
        ("a: 2026-99-99\n", "r.yaml:1: a: found '2026-99-99', which is no value: month must be in 1..12"),
        ("a: !!python/name:os.system x\n", None),
        ("a: 1\n---\nb: 2\n", "r.yaml:2: not YAML: but found another document"),
    ],
)
def test_refusals(text, sentence):
    with pytest.raises(ConfigError) as e:
        parse(text, "r.yaml")
    assert "\n" not in str(e.value)
    if sentence:
        assert str(e.value) == sentence


def test_aliases_and_merges():
    source = parse("base: &b {m: 1, n: 2}\na:\n  <<: *b\n  n: 3\nc: *b\n", "r.yaml")
    assert source.data == {"base": {"m": 1, "n": 2}, "a": {"m": 1, "n": 3}, "c": {"m": 1, "n": 2}}


def test_unreadable_files(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^none\.yaml: cannot be read: No such file or directory$"):
        read(tmp_path / "none.yaml", "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match=r"^l\.yaml: found byte 3 that is not UTF-8, expected YAML text$"):
        read(tmp_path / "latin.yaml", "l.yaml")


def test_empty_is_none():
    assert parse("", "r.yaml").data is None
