"""YAML with the line of every key: a file as plain data, and where each part of it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from atlas_lab.experiments.errors import ConfigError

Part = str | int
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Source:
    """A YAML file: its data, and the line on which each part begins. `name` is how messages spell the file."""

    name: str
    path: Path
    data: Any
    lines: dict[tuple[Part, ...], int] = field(default_factory=dict)

    def line(self, where: Sequence[Part]) -> int:
        """The line of `where`, or of the nearest part around it that the file has."""
        parts = tuple(where)
        while parts and parts not in self.lines:
            parts = parts[:-1]
        return self.lines.get(parts, 1)

    def error(self, where: Sequence[Part], sentence: str) -> ConfigError:
        """`registry.yaml:14: experiments.x.m[2]: <sentence>`."""
        spelled = spell(where)
        return ConfigError(f"{self.name}:{self.line(where)}: " + (f"{spelled}: " if spelled else "") + sentence)


def spell(where: Sequence[Part]) -> str:
    """`experiments.x.m[2]`; a key that has dots of its own is quoted, `pins['ffn.*']`."""
    out = ""
    for part in where:
        if isinstance(part, int):
            out += f"[{part}]"
        elif "." in part:
            out += f"[{part!r}]"
        else:
            out += f".{part}" if out else part
    return out


def read(path: Path, name: str | None = None) -> Source:
    """The YAML file at `path`; raises ConfigError where it cannot be read, is no YAML, or repeats a key."""
    name = name or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{name}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{name}: found byte {e.start} that is not UTF-8, expected YAML text") from None
    return parse(text, name, path)


def parse(text: str, name: str, path: Path = Path()) -> Source:
    """YAML text as a `Source`; raises ConfigError as `read` does."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        walk = _Walk(Source(name, path, None), loader)
        data = None if node is None else walk.value(node, ())
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{name}:{line}: not YAML: {e.problem or e.context}") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"{name}: not YAML: {e}".replace("\n", " ")) from None
    finally:
        loader.dispose()
    return Source(name, path, data, walk.source.lines)


class _Walk:
    """Turns nodes into data, noting lines; an anchor that holds itself is refused."""

    def __init__(self, source: Source, loader: yaml.SafeLoader) -> None:
        self.source = source
        self.loader = loader
        self.open: set[int] = set()

    def value(self, node: yaml.Node, where: tuple[Part, ...]) -> Any:
        self.source.lines.setdefault(where, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            try:
                return self.loader.construct_object(node)
            except ValueError as e:  # 2026-99-99 looks like a date
                raise self.source.error(where, f"found {node.value!r}, which is no value: {e}") from None
        if id(node) in self.open:
            raise self.source.error(where, "found an alias of what it stands in, expected values")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(n, (*where, i)) for i, n in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, where)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, where: tuple[Part, ...]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for part in parts:
                    values = self.value(part, where)
                    if not isinstance(values, dict):
                        raise self.source.error(where, f"found << of {values!r}, expected a mapping")
                    merged = {**values, **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.source.error(where, f"found a key on line {line} that is a list or mapping, expected a word")
            key = str(key_node.value)
            at = (*where, key)
            if key in first:
                raise ConfigError(f"{self.source.name}:{line}: {spell(at)}: duplicate key, first on line {first[key]}")
            first[key] = line
            self.source.lines[at] = line
            own[key] = self.value(value_node, at)
        return {**merged, **own}
