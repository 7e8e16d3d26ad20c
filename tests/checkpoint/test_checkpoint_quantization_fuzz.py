"""Configs and tensors, made right at random and damaged at random: the right answer or one sentence, and never late."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_files import CONVENTIONS, PREFIX, SHAPES, write_mixed

from atlas_lab.checkpoint import CheckpointError, Store, open_checkpoint, quantization, recognise
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import get
from atlas_lab.formats.dtypes import DTYPES

MODULES = list(SHAPES)
TENSORS = {
    c: {m: {s: Tensor(next(d.name for d in DTYPES.values() if d.numpy == a.dtype), a.shape, f"{m}.{s}")
            for s, a in make(np.zeros(SHAPES[m], np.float32)).items()} for m in MODULES}
    for c, (_, make) in CONVENTIONS.items()
}  # fmt: skip
SPELLED = ("model.language_model.", "language_model.model.", "language_model.", "model.")
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "in_proj_ba": ("in_proj_b", "in_proj_a"),
         "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}  # fmt: skip

# For each kind of config, conventions that it can describe and how it says so.
CT = {
    "ct block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "ct channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "ct tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "ct nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "ct nvfp4, weights only": {"num_bits": 4, "type": "float", "group_size": 16},
}
OPT = {
    "modelopt tensor": "FP8",
    "modelopt channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "modelopt block, rank 4": "FP8_PB_WO",
    "modelopt nvfp4": "NVFP4",
    "modelopt nvfp4, weights only": "W4A16_NVFP4",
}
FINE = ("hf block", "hf block, bf16 scales")


def recognised(held: dict[str, str]):
    tensors = {t.name: t for m, c in held.items() for t in TENSORS[c][m].values()}
    return tensors, {m: recognise(tensors, m) for m in held}


def agree(config: object, held: dict[str, str]) -> None:
    tensors, weights = recognised(held)
    configs = quantization.read({"quantization_config": config}, None, tensors)
    for m, w in weights.items():
        assert w is not None
        assert w.format == CONVENTIONS[held[m]][0]  # whatever the config says
        quantization.agree(configs, w, SHAPES[m])


@st.composite
def spelled(draw, modules: list[str]) -> list[str]:
    """Names of these modules and of no other, in any spelling."""
    prefix = draw(st.sampled_from(SPELLED))
    names = [prefix + m.removeprefix("model.language_model.") for m in modules]
    for fused, parts in FUSED.items():
        parents = {n.rpartition(".")[0] for n in names}
        for parent in parents:
            all_here = {f"{parent}.{p}" for p in parts}
            if all_here <= set(names) and draw(st.booleans()):
                names = [n for n in names if n not in all_here] + [f"{parent}.{fused}"]
    return draw(st.permutations(names))


def expression(name: str) -> str:
    return "re:" + name.replace(".", r"\.").replace("layers\\.0", r"layers\.(?:0|7)") + "$"


@st.composite
def right(draw):
    """A config and the convention of each module, which agree."""
    kind = draw(st.sampled_from(["ct", "opt", "fine"]))
    known = {"ct": list(CT), "opt": list(OPT), "fine": list(FINE)}[kind]
    held = {m: draw(st.sampled_from([*known, "bf16"])) for m in MODULES}
    by = {c: [m for m in MODULES if held[m] == c] for c in (*known, "bf16")}
    if kind == "fine":
        skipped = draw(spelled(by["bf16"]))
        return {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": skipped}, held
    if kind == "opt":
        layers = {n: {"quant_algo": OPT[c]} for c in known for n in draw(spelled(by[c]))}
        return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, held
    rest = draw(st.sampled_from([*known, ""]))  # the convention of `Linear`, if any
    groups, ignore = {}, []
    for c in known:
        names = draw(spelled(by[c]))
        targets = ["Linear"] if c == rest else [expression(n) if draw(st.booleans()) else n for n in names]
        groups[f"group_{len(groups)}"] = {"targets": targets, "weights": CT[c]}
    if rest:
        ignore = [expression(n) if draw(st.booleans()) else n for n in draw(spelled(by["bf16"]))]
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignore}, held


def outcome(do: Callable[[], Any]) -> tuple[Any, str]:
    """What it returns, and the sentence where it refuses; anything else is a bug."""
    try:
        return do(), ""
    except CheckpointError as e:
        sentence = str(e)
    assert sentence.isprintable()
    assert len(sentence) < 3000
    return None, sentence


def same_meaning(a: str, b: str) -> bool:
    return CONVENTIONS[a][0] == CONVENTIONS[b][0]


@settings(max_examples=150)
@given(right(), st.data())
def test_what_is_right_agrees_and_one_other_weight_does_not(case, data):
    config, held = case
    agree(config, held)
    module = data.draw(st.sampled_from(MODULES))
    other = data.draw(st.sampled_from([c for c in CONVENTIONS if not same_meaning(c, held[module])]))
    n, k = SHAPES[module]
    if config["quant_method"] == "fp8" and (n % 128 or k % 128):
        return  # either is right: tiles do not divide it
    with pytest.raises(CheckpointError) as e:
        agree(config, held | {module: other})
    assert str(e.value).startswith(f"{module}.weight")
    assert "config.json: quantization_config." in str(e.value)


@settings(max_examples=100)
@given(right(), st.data())
def test_one_name_less_is_noticed(case, data):
    config, held = case
    lists = [("modules_to_not_convert", config)] if config["quant_method"] == "fp8" else []
    lists += [("ignore", config)] if config.get("ignore") else []
    lists = [(key, where) for key, where in lists if where[key]]
    if not lists:
        return
    key, where = data.draw(st.sampled_from(lists))
    gone = data.draw(st.integers(0, len(where[key]) - 1))
    changed = {**config, key: [n for i, n in enumerate(where[key]) if i != gone]}
    if config["quant_method"] == "fp8" and where[key][gone].rpartition(".")[2].startswith("in_proj_"):
        return  # tiles may not divide it
    with pytest.raises(CheckpointError):
        agree(changed, held)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 300), st.floats(allow_nan=False), st.text(max_size=6),
    st.sampled_from(["Linear", "re:.*", "re:(a+)+b", "re:(", "*", "float", "block", "NVFP4", "MIXED_PRECISION",
                     "\ud800", "a\nb", "re:" + "(.*)" * 20 + "x", "re:(?!x)", 10**30]),
)  # fmt: skip
keys = st.text(max_size=4) | st.sampled_from([
    "quant_method", "quant_algo", "config_groups", "targets", "weights", "ignore", "quantized_layers", "group_size",
    "weight_block_size", "modules_to_not_convert", "quantization", "\ud800", "a\nb",
])  # fmt: skip
trees = st.recursive(leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(keys, t, max_size=3))


def places(value, path=()):
    """Paths of everything in a tree."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, v in items:
        yield from places(v, (*path, key))


@st.composite
def damaged(draw):
    config, held = draw(right())
    root = {"": copy.deepcopy(config)}
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([p for p in places(root) if p]))
        at = root
        for key in path[:-1]:
            at = at[key]
        match draw(st.sampled_from(["replace", "drop", "copy"])):
            case "drop" if len(path) > 1:
                del at[path[-1]]
            case "copy" if isinstance(at, list):
                at.append(copy.deepcopy(at[path[-1]]))
            case _:
                at[path[-1]] = draw(trees)
    return root[""], held


@settings(max_examples=250)
@given(damaged())
def test_a_damaged_config_is_right_or_one_sentence(case):
    config, held = case
    started = time.perf_counter()
    _, sentence = outcome(lambda: agree(config, held))
    assert time.perf_counter() - started < 5
    assert not sentence or sentence.startswith(("config.json: quantization_config", PREFIX))


@settings(max_examples=300)
@given(trees)
def test_any_json_is_right_or_one_sentence(config):
    held = dict.fromkeys(MODULES, "bf16")
    _, sentence = outcome(lambda: agree(config, held))
    assert not sentence or sentence.startswith(("config.json: quantization_config", PREFIX))


@settings(max_examples=500)
@given(st.sampled_from(list(CONVENTIONS)), st.data())
def test_damaged_tensors_are_a_weight_that_can_be_read_or_one_sentence(convention, data):
    tensors = dict(TENSORS[convention][MODULES[0]])
    m = MODULES[0]
    for _ in range(data.draw(st.integers(1, 3))):
        suffix = data.draw(st.sampled_from(list(tensors) or ["weight"]))
        t = tensors.get(suffix, Tensor("bf16", (4, 4)))
        shape = list(t.shape)
        match data.draw(st.sampled_from(["dtype", "extent", "add", "remove", "rename", "gone"])):
            case "dtype":
                t = Tensor(data.draw(st.sampled_from(list(DTYPES))), t.shape, t.name)
            case "extent" if shape:
                shape[data.draw(st.integers(0, len(shape) - 1))] = data.draw(
                    st.sampled_from([0, 1, 2, 3, 16, 24, 128, 384])
                )
            case "add":
                shape.insert(data.draw(st.integers(0, len(shape))), data.draw(st.integers(0, 2)))
            case "remove" if shape:
                del shape[data.draw(st.integers(0, len(shape) - 1))]
            case "rename":
                known = [s for of in TENSORS.values() for s in of[m]] + ["weight_zero_point", "weight_shape", "qweight"]
                tensors.pop(suffix, None)
                suffix = data.draw(st.sampled_from(known))
            case "gone":
                tensors.pop(suffix, None)
                continue
        tensors[suffix] = Tensor(t.dtype, tuple(shape), f"{m}.{suffix}")
    held = {t.name: t for t in tensors.values()}
    w, sentence = outcome(lambda: recognise(held, m))
    if sentence:
        assert sentence.startswith(m)
        return
    if w is None:
        assert not any(s in tensors for s in ("weight", "weight_packed"))
        return
    # What was taken for a weight has all that its format reads, of the right shapes and dtypes, and nothing is lost.
    arrays = {f: np.zeros(t.shape, DTYPES[t.dtype].numpy) for f, t in w.fields}
    assert all((DTYPES[t.dtype].numpy, t.elements) == (DTYPES[held[t.name].dtype].numpy, held[t.name].elements)
               for t in w.tensors.values())  # fmt: skip
    with np.errstate(invalid="ignore"):
        values = get(w.format).dequantize(arrays)
    assert values.ndim == 2
    assert values.size
    used = {t.name for t in w.tensors.values()} | {t.name for _, t in w.activation}
    assert set(held) == used


@settings(max_examples=25)
@given(right(), st.data())
def test_whole_checkpoints(tmp_path_factory, case, data):
    config, held = case
    folder = tmp_path_factory.mktemp("fuzz")
    write_mixed(folder, held, quantization_config=config)
    assert {p.weight for p in open_checkpoint(folder).projections} == set(recognised(held)[1].values())
    text = (folder / "config.json").read_text()
    at = data.draw(st.integers(0, len(text) - 1))
    (folder / "config.json").write_text(text[:at] + data.draw(st.text(max_size=2)) + text[at + 1 :], "utf-8")
    found, sentence = outcome(lambda: open_checkpoint(folder))
    if sentence:
        assert sentence.startswith(str(folder))
        return
    store = Store.open(folder)
    for p in found.projections:
        module = p.weight["weight"].name.removesuffix(".weight").removesuffix(".weight_packed")
        assert p.weight == recognise(store.tensors, module)
