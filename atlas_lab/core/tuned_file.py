"""Files of tuned tables: `core/tuned/<target>.yaml`, what was measured to be best, and by which run.

    schema: atlas-lab.tuned/1
    target: h200
    runs:
    - {card: NVIDIA H200, driver: ..., tools: {atlas-lab: ...}, command: atlas-lab tune, date: ...}
    entries:
    - {arm: ..., format: ..., n: ..., k: ..., run: 0, setting: {...}, us: {1: ..., 16: ...}, read_us: ...,
       model_setting: {...}, model_us: {1: ..., 16: ...}}

Times are microseconds a call by M, of the best setting and of the one the chip model puts first; `read_us` is the read
kernel over the same bytes, in the same run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from atlas_lab.core.levers import nearest
from atlas_lab.core.tuning import Choice, Setting, Table, TuningError

SCHEMA = "atlas-lab.tuned/1"
MOST_US = 1e9
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Times = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Run:
    """What measured: the card and its driver, versions of the tools, the command, the day."""

    card: str
    driver: str
    tools: tuple[tuple[str, str], ...]
    command: str
    date: str


@dataclass(frozen=True)
class Measured:
    """One entry. `us` and `model_us` are microseconds a call by M."""

    choice: Choice
    format: str
    us: Times
    read_us: float
    model_setting: Setting
    model_us: Times
    run: Run


@dataclass(frozen=True)
class TunedFile:
    """A target's entries, each arm and shape once."""

    target: str
    entries: tuple[Measured, ...] = ()

    @property
    def table(self) -> Table:
        return Table.of(e.choice for e in self.entries)

    def merged(self, newer: Iterable[Measured]) -> TunedFile:
        """These entries, with `newer` ones in place of those for the same arm and shape."""
        known = {(e.choice.arm, e.choice.n, e.choice.k): e for e in (*self.entries, *newer)}
        return TunedFile(self.target, tuple(sorted(known.values(), key=lambda e: e.choice)))

    def text(self) -> str:
        """The file; runs that no entry is of are left out."""
        runs = list(dict.fromkeys(e.run for e in self.entries))
        lines = ["# Written by `atlas-lab tune`; docs/tuning.md says how.", f"schema: {SCHEMA}"]
        lines += [f"target: {self.target}", "runs:" if runs else "runs: []"]
        lines += [_line({**asdict(r), "tools": dict(r.tools)}) for r in runs]
        lines += ["entries:" if self.entries else "entries: []"]
        for e in self.entries:
            c = e.choice
            lines.append(
                _line(
                    {
                        **{"arm": c.arm, "format": e.format, "n": c.n, "k": c.k, "run": runs.index(e.run)},
                        **{"setting": dict(c.setting), "us": dict(e.us), "read_us": e.read_us},
                        **{"model_setting": dict(e.model_setting), "model_us": dict(e.model_us)},
                    }
                )
            )
        return "\n".join(lines) + "\n"


def _line(entry: dict[str, Any]) -> str:
    return "- " + yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=1 << 20).strip()


def shipped_path(target: str) -> Path:
    """Where the package keeps a target's table, whether it has one or not."""
    return Path(str(files("atlas_lab.core"))) / "tuned" / f"{target}.yaml"


@cache
def shipped_table(target: str) -> Table:
    """The table that the package has for a target, empty where it has none; raises TuningError for a file that is
    wrong."""
    path = shipped_path(target)
    return read_tuned(path, target).table if path.is_file() else Table()


def read_tuned(path: Path, target: str) -> TunedFile:
    """A target's file; raises TuningError where it cannot be read or says anything that it may not."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise TuningError(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError as e:
        raise TuningError(f"{path}: found byte {e.start} that is not UTF-8, expected YAML text") from None
    return parse_tuned(text, path.name, target)


def parse_tuned(text: str, name: str, target: str) -> TunedFile:
    """The file called `name`, of `target`; raises TuningError."""
    p = _Parser(name)
    top = p.mapping(p.load(text), "", ("schema", "target", "runs", "entries"))
    for key, expected in (("schema", SCHEMA), ("target", target)):
        if top[key] != expected:
            raise p.error(key, top[key], expected)
    runs = [p.run(f"runs[{i}]", r) for i, r in enumerate(p.sequence(top["runs"], "runs"))]
    entries = [p.entry(f"entries[{i}]", e, runs) for i, e in enumerate(p.sequence(top["entries"], "entries"))]
    seen: dict[tuple[str, int, int], int] = {}
    for i, e in enumerate(entries):
        c = e.choice
        first = seen.setdefault((c.arm, c.n, c.k), i)
        if first != i:
            raise TuningError(f"{name}: entries[{i}]: found {c.arm} {c.n}x{c.k} again, expected entries[{first}] alone")
    return TunedFile(target, tuple(sorted(entries, key=lambda e: e.choice)))


class _Parser:
    """Checks parts of one file, and says where a wrong one stands."""

    def __init__(self, name: str) -> None:
        self.name = name

    def error(self, where: str, found: Any, expected: str) -> TuningError:
        at = f"{self.name}: {where}" if where else self.name
        return TuningError(f"{at}: found {found!r}, expected {expected}")

    def load(self, text: str) -> Any:
        try:
            node = yaml.compose(text, Loader=_LOADER)
            self._unique(node, set())
            return yaml.load(text, Loader=_LOADER)
        except (yaml.YAMLError, ValueError) as e:
            if isinstance(e, TuningError):
                raise
            mark = getattr(e, "problem_mark", None)
            at = f"{self.name}:{mark.line + 1}" if mark else self.name
            raise TuningError(f"{at}: not YAML: {' '.join(str(getattr(e, 'problem', None) or e).split())}") from None

    def _unique(self, node: Any, seen: set[int]) -> None:
        """Raise for a key that a mapping has twice."""
        if node is None or id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if str(key.value) in keys:
                    line = key.start_mark.line + 1
                    raise TuningError(f"{self.name}:{line}: found the key {key.value!r} twice, expected it once")
                keys.add(str(key.value))
                self._unique(value, seen)
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                self._unique(value, seen)

    def mapping(self, value: Any, where: str, keys: Collection[str]) -> dict[str, Any]:
        """A mapping with exactly these keys."""
        if not isinstance(value, dict):
            raise self.error(where, value, f"a mapping with {', '.join(keys)}")
        for key in value:
            if key not in keys:
                near = nearest(str(key), keys)
                raise self.error(where, key, f"one of {', '.join(keys)}{near}")
        for key in keys:
            if key not in value:
                raise TuningError(f"{self.name}: {f'{where}.' if where else ''}{key}: missing")
        return value

    def sequence(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.error(where, value, "a list")
        return value

    def text(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.error(where, value, "text")
        return value

    def integer(self, value: Any, where: str, least: int = 1) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(where, value, f"an integer of {least} or more")
        return value

    def microseconds(self, value: Any, where: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MOST_US:
            raise self.error(where, value, "microseconds, more than 0")
        return float(value)

    def run(self, where: str, value: Any) -> Run:
        r = self.mapping(value, where, ("card", "driver", "tools", "command", "date"))
        tools = self._items(r["tools"], f"{where}.tools")
        said = {key: self.text(r[key], f"{where}.{key}") for key in ("card", "driver", "command", "date")}
        return Run(**said, tools=tuple((t, self.text(v, f"{where}.tools.{t}")) for t, v in tools))

    def entry(self, where: str, value: Any, runs: list[Run]) -> Measured:
        keys = ("arm", "format", "n", "k", "run", "setting", "us", "read_us", "model_setting", "model_us")
        e = self.mapping(value, where, keys)
        number = self.integer(e["run"], f"{where}.run", 0)
        if number >= len(runs):
            raise self.error(f"{where}.run", number, f"the number of one of {len(runs)} runs, from 0")
        n, k = (self.integer(e[key], f"{where}.{key}") for key in ("n", "k"))
        return Measured(
            choice=Choice(self.text(e["arm"], f"{where}.arm"), n, k, self._setting(e["setting"], f"{where}.setting")),
            format=self.text(e["format"], f"{where}.format"),
            us=self._times(e["us"], f"{where}.us"),
            read_us=self.microseconds(e["read_us"], f"{where}.read_us"),
            model_setting=self._setting(e["model_setting"], f"{where}.model_setting"),
            model_us=self._times(e["model_us"], f"{where}.model_us"),
            run=runs[number],
        )

    def _items(self, value: Any, where: str) -> list[tuple[Any, Any]]:
        if not isinstance(value, dict) or not value:
            raise self.error(where, value, "a mapping with one key or more")
        return list(value.items())

    def _setting(self, value: Any, where: str) -> Setting:
        items = [
            (self.text(name, where), self.integer(v, f"{where}.{name}", 0)) for name, v in self._items(value, where)
        ]
        return tuple(sorted(items))

    def _times(self, value: Any, where: str) -> Times:
        items = self._items(value, where)
        return tuple(sorted((self.integer(m, where), self.microseconds(us, f"{where}.{m}")) for m, us in items))
