"""The 27B model as handles, in the formats of the documents, and its plans."""

from __future__ import annotations

from dataclasses import replace

from atlas_lab import checkpoint
from atlas_lab.checkpoint import Sizes, qwen35
from atlas_lab.checkpoint.mix import mix
from atlas_lab.core.context import Context, ModelDims, Order, Preferences
from atlas_lab.core.projection import Projection, Site, WeightSource
from atlas_lab.core.registry import Registry
from atlas_lab.core.rows import PHASES
from atlas_lab.core.tensor import Tensor
from atlas_lab.experiments.whole_model import ModelPlan, plan_model
from atlas_lab.formats import get

SIZES = checkpoint.sizes("qwen3.6-27b")
KEPT = ("gdn.b", "gdn.a", "lm_head")
# Prefill of NVFP4 FFNs as engines have it: transposed copies, or Q4_K for gate and up and int8 for down.
BASE = (Order("ffn.*", PHASES["prefill"], ("fake_w4a16_t",), "arms"),)
HYBRID = (
    Order("ffn.down", PHASES["prefill"], ("fake_w4a8_int8",), "arms"),
    Order("ffn.*", PHASES["prefill"], ("fake_q4k_mmq",), "arms"),
)


def sites(spelled: str, s: Sizes = SIZES) -> list[Site]:
    """As `checkpoint new --format SPELLED` names and shapes them; packed formats beside BF16 gates and head."""
    made = qwen35.synthetic_sites(s, "bf16")
    return [Site(tuple(_stored(p, spelled) for p in site.projections)) for site in made]


def _stored(p: Projection, spelled: str) -> Projection:
    module = p.weight["weight"].name.removesuffix(".weight")
    if spelled.startswith("q2_0"):
        return p if p.role in KEPT else replace(p, weight=packed(module, spelled, p.n, p.k))
    return replace(p, weight=mix(spelled).of(p.role).source(module, p.n, p.k))


def packed(module: str, name: str, n: int, k: int) -> WeightSource:
    f = get(name)
    fields = tuple((field, Tensor(s.dtype, s.shape, f"{module}.{field}")) for field, s in f.tensors(n, k).items())
    return WeightSource(f.name, f.family, f.geometry, fields)


def context(registry: Registry, orders: tuple[Order, ...] = (), dims: ModelDims = SIZES.dims, **more) -> Context:
    target = registry.target("h200")
    budget = {"memory_budget": int(target.memory.value)}
    return Context(target, dims, preferences=Preferences((), orders), **{**budget, **more})


def planned(registry: Registry, spelled: str, orders: tuple[Order, ...] = (), s: Sizes = SIZES, **more) -> ModelPlan:
    return plan_model(spelled, sites(spelled, s), context(registry, orders, s.dims, **more), registry)
