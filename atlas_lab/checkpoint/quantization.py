"""What a checkpoint's configs say of its weights, and whether the tensors agree.

The tensors decide what a weight is; `quantization_config` in config.json and hf_quant_config.json are checked against
them. Names match as each producer matches them: compressed_tensors/utils/match.py,
transformers/quantizers/quantizers_utils.py, and the wildcards of ModelOpt's `exclude_modules`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from atlas_lab.checkpoint import schemes
from atlas_lab.checkpoint.json_object import (
    CheckpointError,
    brief,
    is_integer,
    is_text,
    parse_object,
    read_bytes,
    shown,
)
from atlas_lab.checkpoint.module_names import Entries, Entry
from atlas_lab.checkpoint.patterns import Budget, Pattern
from atlas_lab.checkpoint.schemes import TITLES, UNQUANTIZED, Claim, Scheme
from atlas_lab.checkpoint.sliced import base_name
from atlas_lab.core.projection import Site, WeightSource
from atlas_lab.core.tensor import Tensor

KEY = "quantization_config"
HF_QUANT_CONFIG = "hf_quant_config.json"
CODES = (".weight", ".weight_packed")  # what a module's name is followed by

# Modules that may be BF16 whatever a config says of linear ones: to its writer they were no linear module, or, as the
# prediction head to transformers, no part of the model.
_APART = re.compile(r"(^|.*\.)(lm_head|embed_tokens)|mtp\..*")


class Config(Protocol):
    """One config of a checkpoint."""

    def claims(self, module: str, shape: tuple[int, int]) -> Sequence[Claim]:
        """What the weight `[N, K]` of a module may be by this config; empty where it says nothing."""
        ...


@dataclass(frozen=True)
class _Place:
    """Where in a config something stands, and what its entries are matched against."""

    label: str
    modules: Collection[str]
    budget: Budget

    def __getitem__(self, key: str | int) -> _Place:
        part = f"[{key}]" if isinstance(key, int) else f".{shown(key)}"
        return replace(self, label=self.label + part)

    def entries(self, items: Iterable[Entry]) -> Entries:
        return Entries(tuple(items), self.modules, self.budget)

    def fail(self, found: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.label}: found {brief(found)}, expected {expected}")


class CompressedTensors:
    """`config_groups` whose targets are names, `re:` expressions or classes, and an `ignore` list above them all."""

    def __init__(self, config: Mapping[str, Any], at: _Place, nvfp4: str = "nvfp4_ct") -> None:
        """`nvfp4` is the format of 4-bit floats, which ModelOpt describes in the same words."""
        transforms = _mapping(config.get("transform_config") or {}, at["transform_config"])
        if transforms.get("config_groups"):
            raise at["transform_config"].fail(transforms, "none, so that weights are stored as they multiply")
        self._at = at
        targets: list[Entry] = []
        for name, group in _mapping(config.get("config_groups"), at["config_groups"]).items():
            here = at["config_groups"][name]
            named, scheme = _group(name, group, here, nvfp4)
            if scheme is not None:
                targets += _expressions(named, here if isinstance(group, list) else here["targets"], scheme)
        ignored = [*_expressions(config.get("ignore"), at["ignore"], UNQUANTIZED)]
        self._ignored, self._targets = at.entries(ignored), at.entries(targets)
        self._ignored_linear, self._linear = ([e.claim for e in es if e.text == "Linear"] for es in (ignored, targets))

    def claims(self, module: str, shape: tuple[int, int]) -> Sequence[Claim]:
        """BF16 for an ignored module and for one that no group targets. Of the groups that target it by name, else by
        expression, else by class, any may be right: readers of these configs differ in the order."""
        ignored = self._ignored.named(module) or self._ignored.matching(module) or self._ignored_linear
        if ignored:
            return ignored[:1]
        found = self._targets.named(module) or self._targets.matching(module) or self._linear
        return found or (Claim(UNQUANTIZED, f"{self._at.label}.config_groups (no target is this module)"),)


def _group(name: str, group: object, at: _Place, nvfp4: str) -> tuple[object, Scheme | None]:
    """Targets and scheme of a group; no scheme for one of activations alone."""
    if isinstance(group, list):  # the name of a preset, with its targets
        return group, schemes.PRESETS.get(name.upper(), Scheme.unread(name))
    fields = _mapping(group, at)
    if fields.get("weights") is None:
        return None, None
    weights = at["weights"]
    return fields.get("targets"), schemes.compressed_tensors(_mapping(fields["weights"], weights), weights.label, nvfp4)


class ModelOpt:
    """One `quant_algo` for every linear module, or one for each of `quantized_layers`; `ignore` or `exclude_modules`
    holds names and wildcards that go before."""

    def __init__(self, config: Mapping[str, Any], at: _Place) -> None:
        if "quantization" in config:  # as hf_quant_config.json nests it
            at = at["quantization"]
            config = _mapping(config["quantization"], at)
        self._at = at
        self._ignored = at.entries(
            e for key in ("ignore", "exclude_modules") for e in _wildcards(config.get(key), at[key])
        )
        self._layers: Entries | None = None
        self._groups: CompressedTensors | None = None
        self._every: tuple[Claim, ...] = ()
        algorithm, layers = config.get("quant_algo"), config.get("quantized_layers")
        if algorithm is not None and not isinstance(algorithm, str):
            raise at["quant_algo"].fail(algorithm, "text")
        mixed = layers is not None or (algorithm is not None and algorithm.upper() == "MIXED_PRECISION")
        if layers is not None:
            self._layers = at.entries(_layers(layers, at["quantized_layers"]))
        elif config.get("config_groups") is not None and (mixed or algorithm is None):
            groups = {k: v for k, v in config.items() if k != "ignore"}
            self._groups = CompressedTensors(groups, at, "nvfp4")
        elif mixed:
            raise CheckpointError(f"{at.label}.quantized_layers: missing, expected one with quant_algo MIXED_PRECISION")
        elif algorithm is not None:
            scheme = schemes.modelopt(algorithm, config.get("group_size"), at.label)
            self._every = (Claim(scheme, f"{at.label}.quant_algo ({brief(algorithm)})"),)

    def claims(self, module: str, shape: tuple[int, int]) -> Sequence[Claim]:
        """BF16 for an excluded module; where an entry is only part of its name (older exports), that too."""
        ignored = self._ignored.named(module) or self._ignored.matching(module)
        if ignored:
            return ignored[:1]
        return (*self._stated(module, shape), *self._ignored.within(module))

    def _stated(self, module: str, shape: tuple[int, int]) -> Sequence[Claim]:
        if self._groups is not None:
            return self._groups.claims(module, shape)
        if self._layers is None:
            return self._every
        found = self._layers.named(module) or self._layers.matching(module)
        return found or (Claim(UNQUANTIZED, f"{self._at.label}.quantized_layers (this module is not there)"),)


def _layers(layers: object, at: _Place) -> Iterator[Entry]:
    for name, layer in _mapping(layers, at).items():
        here = at[name]
        fields = _mapping(layer, here)
        algorithm = fields.get("quant_algo")
        if not isinstance(algorithm, str):
            raise here["quant_algo"].fail(algorithm, "text")
        claim = Claim(schemes.modelopt(algorithm, fields.get("group_size"), here.label), here.label)
        yield Entry(name, claim, Pattern.glob(name) if "*" in name else None)


class FineGrained:
    """transformers' `fp8`: every linear module in tiles, or under one scale where `weight_block_size` is null, but for
    `modules_to_not_convert`; and its `fbgemm_fp8`, under a scale a row."""

    def __init__(self, config: Mapping[str, Any], at: _Place) -> None:
        key = "modules_to_not_convert"
        if config.get(key) is None and "ignored_layers" in config:
            key = "ignored_layers"
        self._kept = at.entries(_beginnings(config.get(key), at[key]))
        self._tile = (128, 128)
        block = at["weight_block_size"]
        size = config.get("weight_block_size")
        if config.get("quant_method") == "fbgemm_fp8":
            self._claim = Claim(Scheme.of("fp8_row"), f"{at.label}.quant_method")
        elif "weight_block_size" not in config:
            self._claim = Claim(Scheme.of("fp8", "fp8_tensor"), f"{at.label}.quant_method")
        elif size is None:
            self._claim = Claim(Scheme.of("fp8_tensor"), f"{block.label} (null)")
        elif isinstance(size, list) and len(size) == 2 and all(is_integer(e) and e > 0 for e in size):
            self._tile = (size[0], size[1])
            scheme = Scheme.of("fp8") if size == [128, 128] else Scheme.unread(f"FP8 under {size[0]}x{size[1]} tiles")
            self._claim = Claim(scheme, block.label)
        else:
            raise block.fail(size, "two integers of 1 or more")

    def claims(self, module: str, shape: tuple[int, int]) -> Sequence[Claim]:
        """BF16 for a kept module; a weight that tiles do not divide is left as it was, silently."""
        kept = self._kept.beginning(module) or self._kept.matching(module)
        if kept:
            return kept[:1]
        if any(extent % tile for extent, tile in zip(shape, self._tile, strict=True)):
            return (self._claim, Claim(UNQUANTIZED, f"{self._claim.entry} (tiles do not divide it)"))
        return (self._claim,)


def _expressions(names: object, at: _Place, scheme: Scheme) -> Iterator[Entry]:
    for text, here in _names(names, at):
        pattern = Pattern.regex(text.removeprefix("re:"), here.label) if text.startswith("re:") else None
        yield Entry(text, Claim(scheme, f"{here.label} ({brief(text)})"), pattern)


def _wildcards(names: object, at: _Place) -> Iterator[Entry]:
    for text, here in _names(names, at):
        claim = Claim(UNQUANTIZED, f"{here.label} ({brief(text)})")
        yield Entry(text, claim, Pattern.glob(text) if "*" in text or "?" in text else None)


def _beginnings(names: object, at: _Place) -> Iterator[Entry]:
    for text, here in _names(names, at):
        plain = re.fullmatch(r"[\w.-]*", text)
        pattern = None if plain else Pattern.regex(rf"(?:{text})(?:(?<=\.)|(?=\.|$))", here.label)
        yield Entry(text, Claim(UNQUANTIZED, f"{here.label} ({brief(text)})"), pattern)


def _names(names: object, at: _Place) -> Iterator[tuple[str, _Place]]:
    if names is None:
        return
    if not isinstance(names, list):
        raise at.fail(names, "a list of module names")
    for i, text in enumerate(names):
        if not is_text(text):
            raise at[i].fail(text, "a module name")
        yield text, at[i]


def _mapping(value: object, at: _Place) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise at.fail(value, "an object")
    return value


METHODS = {"compressed-tensors": CompressedTensors, "fp8": FineGrained, "fbgemm_fp8": FineGrained, "modelopt": ModelOpt}


def read(config: Mapping[str, Any], folder: Path | None, tensors: Iterable[str]) -> tuple[Config, ...]:
    """The quantization configs of a checkpoint: those in its config.json (`config`, already read) and its folder's
    hf_quant_config.json. `tensors` are the names it holds. Raises CheckpointError, naming file and key, for a config of
    an unknown method and for values that a producer would not write."""
    modules = {t.removesuffix(s) for t in tensors for s in CODES if t.endswith(s)}
    budget = Budget(f"config.json: {KEY}")
    found: list[Config] = []
    text = config.get("text_config")
    for where, holder in (("", config), ("text_config.", text if isinstance(text, Mapping) else {})):
        if holder.get(KEY) is not None:
            found.append(_read(holder[KEY], _Place(f"config.json: {where}{KEY}", modules, budget)))
    if folder is not None and (folder / HF_QUANT_CONFIG).is_file():
        value = parse_object(read_bytes(folder / HF_QUANT_CONFIG), HF_QUANT_CONFIG)
        at = _Place(f"{HF_QUANT_CONFIG}: quantization", modules, budget)
        found.append(ModelOpt(_mapping(value.get("quantization"), at), at))
    return tuple(found)


def _read(value: object, at: _Place) -> Config:
    config = _mapping(value, at)
    method = config.get("quant_method")
    if method is None:  # older exports leave it out
        held = config.get("quantization", config)
        is_modelopt = isinstance(held, Mapping) and ("quant_algo" in held or "quantized_layers" in held)
        method = "modelopt" if is_modelopt else "compressed-tensors" if "config_groups" in config else None
    name = method.lower().replace("_", "-") if isinstance(method, str) else ""
    key = "modelopt" if name.startswith("modelopt") else name.replace("fbgemm-", "fbgemm_")
    if key not in METHODS:
        raise at["quant_method"].fail(method, f"one of {', '.join(METHODS)}")
    made: Config = METHODS[key](config, at)
    return made


def check_sites(config: Mapping[str, Any], path: Path, tensors: Iterable[str], sites: Iterable[Site]) -> None:
    """Read the quantization configs of the checkpoint at `path` and hold them against every weight; raises
    CheckpointError."""
    configs = read(config, path if path.is_dir() else path.parent, tensors)
    for p in (p for s in sites for p in s.projections):
        agree(configs, p.weight, (p.n, p.k))


def agree(configs: Sequence[Config], weight: WeightSource, shape: tuple[int, int]) -> None:
    """Raise CheckpointError, with what the tensors say and what a config says, where they differ on a weight `[N, K]`.

    What has one meaning agrees under any name: one tile of 128x128 that is the whole weight, and one scale for it.
    """
    codes = base_name(weight.fields[0][1].name)
    module = next((codes.removesuffix(s) for s in CODES if codes.endswith(s)), None)
    if module is None or (weight.format == "bf16" and _APART.fullmatch(module)):
        return
    held = _meanings(weight, shape)
    for config in configs:
        claims = config.claims(module, shape)
        if claims and not any(c.scheme.formats & held for c in claims):
            by_title = {c.scheme.title: c for c in reversed(claims)}
            expected = " or ".join(f"{title} by {c.entry}" for title, c in reversed(by_title.items()))
            raise CheckpointError(f"{codes}: found {_words(weight)}, expected {expected}")


def _meanings(weight: WeightSource, shape: tuple[int, int]) -> frozenset[str]:
    """The formats that the tensors may be called: more than one where a single scale is tile, row or tensor alike."""
    n, k = shape
    if weight.family != "fp8" or weight["scale"].elements != 1:
        return frozenset((weight.format,))
    one = {weight.format: True, "fp8_tensor": True, "fp8": n <= 128 and k <= 128, "fp8_row": n == 1}
    return frozenset(name for name, same in one.items() if same)


def _words(weight: WeightSource) -> str:
    codes, *scales = (t for _, t in weight.fields)
    title = TITLES.get(weight.format, weight.format)
    under = " and ".join(f"{_spell(t)} {t.name.rpartition('.')[2]}" for t in scales)
    return f"{title} ({_spell(codes)}{' with ' + under if under else ''})"


def _spell(t: Tensor) -> str:
    return f"{t.dtype}{list(t.shape)}"
