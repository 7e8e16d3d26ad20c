"""What a stored weight is, from its tensors alone: names, dtypes and shapes. Whatever is ambiguous is refused."""

from __future__ import annotations

from collections.abc import Mapping

from atlas_lab.checkpoint import foreign
from atlas_lab.checkpoint.json_object import CheckpointError
from atlas_lab.checkpoint.naming import ACTIVATION_SUFFIXES, BLOCKS, OPTIONAL, SUFFIXES
from atlas_lab.checkpoint.store import Store
from atlas_lab.core.projection import WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import FormatError, get
from atlas_lab.formats.ggml import Blocks

Tensors = Mapping[str, Tensor]

# Tensors of weights and their companions, in every convention that is read and in those that are refused by name.
_CODES = ("weight", "weight_packed", *BLOCKS)
_KNOWN = tuple(
    dict.fromkeys((*_CODES, *(s for fields in SUFFIXES.values() for suffixes in fields.values() for s in suffixes)))
)

# What stands beside weights and is no part of one, by the last part of its name.
_COMPANIONS = {
    **dict.fromkeys(ACTIVATION_SUFFIXES, "scale of activations"),
    **dict.fromkeys(("k_scale", "v_scale", "k_global_scale", "v_global_scale"), "scale of the KV cache"),
    **dict.fromkeys(("k_zero_point", "v_zero_point"), "zero point of the KV cache"),
    "q_scale": "scale of attention queries",
    "prob_scale": "scale of attention probabilities",
    "output_scale": "scale of outputs",
    "input_zero_point": "zero point of activations",
    "output_zero_point": "zero point of outputs",
    **{s: "part of a quantized weight that no projection reads" for s in _KNOWN if s != "weight"},
    **{s.lstrip("."): "part of a quantized weight that no projection reads" for s in foreign.SUFFIXES},
}
_AFTER = (*(f".{s}" for s in _KNOWN), *foreign.SUFFIXES)


def recognise(tensors: Tensors, module: str) -> WeightSource | None:
    """The weight of `module` (`model.layers.0.mlp.gate_proj`), or None where the checkpoint has none.

    Raises CheckpointError, naming tensor, found and expected, for a weight in no supported convention.
    """
    everything = {after: tensors[module + after] for after in _AFTER if module + after in tensors}
    if not everything:
        return None
    foreign.refuse(everything)
    held = {after.removeprefix("."): t for after, t in everything.items()}
    weights = [s for s in _CODES if s in held]
    if len(weights) != 1:
        wanted = f"{module}.weight or {module}.weight_packed"
        found = ", ".join(held)
        raise CheckpointError(f"{module}: found {found}, expected {'one of ' if weights else ''}{wanted}")
    weight = held[weights[0]]
    family = BLOCKS.get(weights[0]) or _family(weight, packed=weights[0] == "weight_packed")
    fields = _fields(module, family, held)
    if family == "fp8":
        fields["scale"] = _matrix(fields["scale"])
    name = _fp8(weight, fields["scale"]) if family == "fp8" else family
    form = get(name)
    n, k = _shape(weight, name)
    if family != "fp8":  # whose scale's shape chose the format
        _agree(form.tensors(n, k), fields, weight)
    activation = tuple((s, tensors[f"{module}.{s}"]) for s in ACTIVATION_SUFFIXES if f"{module}.{s}" in tensors)
    return WeightSource(form.name, form.family, form.geometry, tuple(fields.items()), activation)


def companion(name: str) -> str:
    """What a tensor beside a weight is, by its name; empty for one that is none."""
    last = name.rpartition(".")[2]
    return _COMPANIONS.get(last) or next(
        (what for s, what in _COMPANIONS.items() if s[0] == "_" and last.endswith(s)), ""
    )


def check_values(store: Store, weight: WeightSource, label: str) -> None:
    """Read a weight and check its values; raises CheckpointError, naming the tensor, for a NaN code or a scale that
    is not finite and positive. `label` says what the weight is for: `layers.0.ffn.gate`."""
    arrays = {field: store.read(t.name) for field, t in weight.fields}
    try:
        get(weight.format).check(arrays, label)
    except FormatError as e:
        subject, _, sentence = str(e).partition(": ")
        named = weight.tensors.get(subject.removeprefix(f"{label}."))
        raise CheckpointError(f"{store.path}: {label}: {named.name if named else subject}: {sentence}") from None


def _family(weight: Tensor, *, packed: bool) -> str:
    """Key into SUFFIXES by the dtype of the codes."""
    if packed:
        if weight.dtype != "u8":
            raise CheckpointError(f"{weight.name}: found dtype {weight.dtype}, expected u8 (NVFP4 codes)")
        return "nvfp4_ct"
    families = {"bf16": "bf16", "e4m3": "fp8", "u8": "nvfp4"}
    if weight.dtype not in families:
        raise CheckpointError(f"{weight.name}: found dtype {weight.dtype}, expected one of {', '.join(families)}")
    return families[weight.dtype]


def _fields(module: str, family: str, held: Tensors) -> dict[str, Tensor]:
    """The tensors of a weight by field; raises CheckpointError where one is missing, doubled or has no place."""
    titles = {"bf16": "BF16", "fp8": "FP8", "nvfp4": "ModelOpt NVFP4", "nvfp4_ct": "compressed-tensors NVFP4"}
    title = titles.get(family, family)
    fields = {}
    for field, suffixes in SUFFIXES[family].items():
        found = [s for s in suffixes if s in held]
        names = " or ".join(f"{module}.{s}" for s in suffixes)
        if not found and (family, field) in OPTIONAL:
            continue
        if not found:
            raise CheckpointError(f"{names}: missing, found {_names(module, held)}, expected it in {title} weights")
        if len(found) > 1:
            raise CheckpointError(f"{module}: found {' and '.join(found)}, expected one of them in {title} weights")
        fields[field] = held[found[0]]
    for suffix in held:
        if held[suffix] not in fields.values():
            expected = ", ".join(t.name.removeprefix(f"{module}.") for t in fields.values())
            raise CheckpointError(f"{module}.{suffix}: found with {title} weights, expected only {expected}")
    return fields


def _names(module: str, held: Tensors) -> str:
    return ", ".join(f"{t.dtype} {suffix}" for suffix, t in held.items())


def _shape(weight: Tensor, form: str) -> tuple[int, int]:
    """N and K of a weight from its codes."""
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise CheckpointError(f"{weight.name}: found shape {list(weight.shape)}, expected two dimensions of 1 or more")
    n, width = weight.shape
    made = get(form)
    k = width * 2 if weight.dtype == "u8" else width
    try:
        if isinstance(made, Blocks):
            n, k = made.weight_shape(weight.shape)
        made.tensors(n, k)
    except FormatError as e:
        raise CheckpointError(f"{weight.name}: {e}") from None
    return n, k


def _matrix(scale: Tensor) -> Tensor:
    """A grid `[R, 1, C, 1]` (ModelOpt's FP8_PB_WO) as `[R, C]`, the same bytes; any other scale as it is."""
    if len(scale.shape) == 4 and scale.shape[1] == scale.shape[3] == 1:
        return scale.view(0, (scale.shape[0], scale.shape[2]))
    return scale


def _fp8(weight: Tensor, scale: Tensor) -> str:
    """Which FP8 format, by the shape of its scale. A tile grid of one row or column of tiles can only be confused
    with a row scale where N is 1 and K at most 128, and there both mean the same."""
    n, k = _shape(weight, "fp8")
    if scale.dtype not in ("f32", "bf16"):
        raise CheckpointError(f"{scale.name}: found dtype {scale.dtype}, expected f32 or bf16")
    grid = get("fp8").tensors(n, k)["scale"].shape
    by_shape = {(n, 1): "fp8_row", (n,): "fp8_row", grid: "fp8", (): "fp8_tensor", (1,): "fp8_tensor"}
    if scale.shape not in by_shape:
        raise CheckpointError(
            f"{scale.name}: found shape {list(scale.shape)}, expected {list(grid)} (128x128 tiles), [{n}, 1] or [{n}] "
            f"(rows), [] or [1] (tensor) for a weight [{n}, {k}]"
        )
    return by_shape[scale.shape]


def _agree(specs: Mapping[str, tuple[str, tuple[int, ...]]], fields: Tensors, weight: Tensor) -> None:
    """Raise CheckpointError for a companion whose dtype or shape the codes do not imply."""
    for field, (dtype, shape) in specs.items():
        if field not in fields:
            continue  # one that a weight may lack
        t = fields[field]
        shapes = ((), (1,)) if field == "global_scale" else (shape,)
        if t.dtype != dtype or t.shape not in shapes:
            wanted = " or ".join(f"{dtype}{list(s)}" for s in shapes)
            raise CheckpointError(
                f"{t.name}: found {t.dtype}{list(t.shape)}, expected {wanted} for the "
                f"{weight.dtype}{list(weight.shape)} codes of {weight.name}"
            )
