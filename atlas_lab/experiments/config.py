"""What `registry.yaml` may say, as models, and its loading: every refusal names file, line, part, found, expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from atlas_lab.blocks.ffn import FFN
from atlas_lab.core.levers import nearest
from atlas_lab.core.rows import PHASES, Rows
from atlas_lab.experiments import yaml_source
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.yaml_source import Source

FILE = "registry.yaml"
BLOCKS = (FFN,)
DEFAULT_ROLES = ["ffn.gate", "ffn.up", "ffn.down"]


def show(value: Any) -> str:
    """A value as a message names it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        return ("a list" if isinstance(value, list) else "a mapping") if value else "an empty value"
    return repr(value)


def _refused(said: str, **more: str) -> PydanticCustomError:
    """A refusal whose sentence is `said`; `key` among `more` says which key of the mapping it is about."""
    return PydanticCustomError("sentence", "{said}", {"said": said, **more})


def _expect(words: str, ok: Callable[[Any], bool]) -> Any:
    def check(value: Any) -> Any:
        if not ok(value):
            raise _refused(f"found {show(value)}, expected {words}")
        return value

    return BeforeValidator(check)


def _integer(least: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least


def _number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v)


Count = Annotated[int, _expect("an integer of 1 or more", _integer(1))]
Index = Annotated[int, _expect("an integer of 0 or more", _integer(0))]
Number = Annotated[float, _expect("a number", _number)]
Positive = Annotated[float, _expect("a number above 0", lambda v: _number(v) and v > 0)]
Block = Annotated[str, _expect(f"one of {', '.join(BLOCKS)}", lambda v: v in BLOCKS)]
Word = Annotated[str, _expect("a name", lambda v: isinstance(v, str) and v != "")]


class Strict(BaseModel):
    """A mapping with these keys and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, value: Any) -> Any:
        if isinstance(value, cls):
            return value
        value = cls.short(value)
        if not isinstance(value, dict):
            raise _refused(f"found {show(value)}, expected {cls.words()}")
        known = list(cls.model_fields)
        for key in value:
            if key not in known:
                said = f"unknown key, expected one of {', '.join(known)}{nearest(key, known)}"
                raise _refused(said, key=key)
        for key, info in cls.model_fields.items():
            if info.is_required() and key not in value:
                raise _refused(f"missing key {key!r}")
        return value

    @classmethod
    def short(cls, value: Any) -> Any:
        """The mapping that a short spelling stands for."""
        return value

    @classmethod
    def words(cls) -> str:
        return "a mapping"


class ModelSpec(Strict):
    """A synthetic model: a preset's name, or a family with its sizes."""

    preset: Word | None = None
    family: Word | None = None
    hidden: Count | None = None
    intermediate: Count | None = None
    layers: Count | None = None
    seed: Index = 0

    @classmethod
    def short(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value

    @classmethod
    def words(cls) -> str:
        return "a preset's name or a mapping with family, hidden and intermediate"


class Dims(Strict):
    """Sizes at which numbers run on the interpreter."""

    hidden: Count
    intermediate: Count


class PinSpec(Strict):
    """An arm's name, or `{arm, rows}` with rows as a phase, one M, or `[first, last]`."""

    arm: Word
    rows: Any = None

    @classmethod
    def short(cls, value: Any) -> Any:
        return {"arm": value} if isinstance(value, str) else value

    @classmethod
    def words(cls) -> str:
        return "an arm's name or a mapping with arm and rows"

    @model_validator(mode="after")
    def _rows(self) -> PinSpec:
        self.range  # noqa: B018  (raises)
        return self

    @property
    def range(self) -> Rows | None:
        r = self.rows
        if r is None:
            return None
        if isinstance(r, str) and r in PHASES:
            return PHASES[r]
        ends = [r, r] if isinstance(r, int) else r
        if isinstance(ends, list) and len(ends) == 2 and all(_integer(1)(x) for x in ends) and ends[0] <= ends[1]:
            return Rows(*ends)
        said = f"found rows {show(r)}, expected {', '.join(PHASES)}, one M, or [first, last]"
        raise _refused(said)


class OrderSpec(Strict):
    """Arms best first: a list for every M, or one for each phase."""

    all: list[Word] = []
    decode: list[Word] = []
    few: list[Word] = []
    prefill: list[Word] = []

    @classmethod
    def short(cls, value: Any) -> Any:
        return {"all": value} if isinstance(value, list) else value

    @classmethod
    def words(cls) -> str:
        return "a list of arms or a mapping by phase (decode, few, prefill)"


class Variant(Strict):
    """One side of a comparison, over the file's base settings."""

    weights: Word | None = None
    checkpoint: Word | None = None
    levers: dict[str, Any] = {}
    pins: dict[str, PinSpec] = {}
    arms: dict[str, OrderSpec] = {}

    @model_validator(mode="after")
    def _one(self) -> Variant:
        if self.weights and self.checkpoint:
            raise _refused("found both weights and checkpoint, expected one of them")
        return self


class Requirement(Strict):
    """Bounds that fail the run: times and bytes over the baseline's, decibels at the least."""

    max_time_ratio: Positive | None = None
    min_snr_db: Number | None = None
    max_bytes_ratio: Positive | None = None


class Experiment(Strict):
    """Variants of one BF16 reference, over layers, roles and row counts. Roles of a block among `blocks` are compared
    as its one program."""

    model: ModelSpec | None = None
    checkpoint: Word | None = None
    interpreter: Dims | None = None
    layers: list[Index] = [0]
    roles: list[Word] = DEFAULT_ROLES
    blocks: list[Block] = []
    m: list[Count]
    baseline: Word
    variants: dict[str, Variant]
    require: dict[str, Requirement] = {}


class Config(Strict):
    """A whole file."""

    plugins: list[Word] = []
    target: Word | None = None
    levers: dict[str, Any] = {}
    arms: dict[str, OrderSpec] = {}
    pins: dict[str, PinSpec] = {}
    experiments: dict[str, Experiment]


@dataclass(frozen=True)
class Loaded:
    """A file's settings, and the file. `how` says why this file, for the first line printed."""

    config: Config
    source: Source
    how: str

    @property
    def base(self) -> Path:
        """What relative paths in the file start from."""
        return self.source.path.parent

    def experiment(self, name: str | None) -> tuple[str, Experiment]:
        """The named experiment, or the first; raises ConfigError naming the nearest."""
        known = self.config.experiments
        name = name or next(iter(known))
        if name not in known:
            said = f"unknown experiment {name!r}, expected one of {', '.join(known)}{nearest(name, known)}"
            raise ConfigError(f"{self.source.name}: {said}")
        return name, known[name]


def packaged() -> Path:
    """The file that comes with the package."""
    return Path(str(files("atlas_lab.experiments").joinpath(FILE)))


def find(path: Path | None = None) -> tuple[Path, str, str]:
    """Which file: `-c`, else `./registry.yaml`, else the packaged copy; with its spelling and why."""
    if path is not None:
        return path, str(path), "-c"
    if Path(FILE).exists():
        return Path(FILE), FILE, f"./{FILE}"
    return packaged(), FILE, f"packaged: no ./{FILE} here"


def load(path: Path | None = None) -> Loaded:
    """The settings of `path` or of the file found; raises ConfigError."""
    file, name, how = find(path)
    return check(yaml_source.read(file, name), how)


def check(source: Source, how: str = "") -> Loaded:
    """A source's data as settings; raises ConfigError for the first line that is wrong."""
    if source.data is None:
        raise ConfigError(f"{source.name}: found nothing, expected a mapping with the key experiments")
    try:
        config = Config.model_validate(source.data)
    except ValidationError as e:
        found = [_sentence(source, dict(error)) for error in e.errors(include_url=False)]
        raise source.error(*min(found, key=lambda f: source.line(f[0]))) from None
    if not config.experiments:
        raise source.error(("experiments",), "found an empty value, expected one experiment or more")
    for name, experiment in config.experiments.items():
        _whole(source, ("experiments", name), experiment)
    return Loaded(config, source, how)


_WORDS = {"list_type": "a list", "dict_type": "a mapping"}


def _sentence(source: Source, error: dict[str, Any]) -> tuple[tuple[str | int, ...], str]:
    where = tuple(error["loc"])
    ctx = error.get("ctx", {})
    if error["type"] == "sentence":
        return (*where, *([ctx["key"]] if "key" in ctx else [])), ctx["said"]
    words = _WORDS.get(error["type"], error["msg"])
    return where, f"found {show(error['input'])}, expected {words}"


def _whole(source: Source, at: tuple[str, ...], x: Experiment) -> None:
    """Refuse an experiment whose parts contradict one another."""
    if (x.model is None) == (x.checkpoint is None):
        found = "both" if x.model else "neither"
        raise source.error(at, f"found {found} of model and checkpoint, expected one of them")
    if x.model and not x.model.preset:
        for key in ("family", "hidden", "intermediate"):
            if getattr(x.model, key) is None:
                raise source.error((*at, "model"), f"missing key {key!r}, expected it or a preset")
    for key, values in (("m", x.m), ("roles", x.roles), ("layers", x.layers), ("blocks", x.blocks)):
        if not values and key != "blocks":
            raise source.error((*at, key), "found an empty value, expected one entry or more")
        for i, value in enumerate(values):
            if value in values[:i]:
                raise source.error((*at, key, i), f"found {value!r} twice, expected each once")
    if not x.variants:
        raise source.error((*at, "variants"), "found an empty value, expected one variant or more")
    for where, name in [((*at, "baseline"), x.baseline)] + [((*at, "require", n), n) for n in x.require]:
        if name not in x.variants:
            known = ", ".join(x.variants)
            raise source.error(where, f"unknown variant {name!r}, expected one of {known}{nearest(name, x.variants)}")
