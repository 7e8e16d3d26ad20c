"""Peers: what they are handed, how often they are called, and that their packages are asked for only then."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from fake_torch import FakeTorch, T

from atlas_lab import formats
from atlas_lab.experiments import bench_peer, peers
from atlas_lab.experiments.errors import ConfigError
from atlas_lab.experiments.peer_graph import Stored
from atlas_lab.formats.dtypes import dtype

N, K = 256, 128


def stored(format: str, scale: str = "") -> Stored:
    w = np.random.default_rng(1).standard_normal((N, K), np.float32)
    tensors = formats.get(format).quantize(w)
    if scale:
        tensors["scale"] = tensors["scale"].astype(dtype(scale).numpy)
    return Stored(format, N, K, tensors)


def rows(m: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((m, K), np.float32).astype(dtype("bf16").numpy)


class HummingLayer:
    """Keeps to the interface of humming 0.1.20; computes with the tensors it was given, by our formats."""

    made: ClassVar[list[HummingLayer]] = []
    FIELDS: ClassVar = {
        "nvfp4": {"weight": "weight", "weight_scale": "scale", "weight_scale_2": "global_scale"},
        "fp8": {"weight": "weight", "weight_scale_inv": "scale"},
    }
    CONFIGS: ClassVar = {
        "nvfp4": {"quant_method": "modelopt", "quant_algo": "nvfp4"},
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }

    def __init__(self, *, shape_n, shape_k, weight_config, torch_dtype) -> None:
        assert (shape_n, shape_k, torch_dtype) == (N, K, FakeTorch.bfloat16)
        (self.format,) = [f for f, c in self.CONFIGS.items() if c == weight_config]
        self.shape_n, self.shape_k = shape_n, shape_k
        self.transformed, self.tuned = False, []
        HummingLayer.made.append(self)

    def cuda(self):
        return self

    def load_from_tensors(self, tensors: dict[str, T]) -> None:
        assert set(tensors) == set(self.FIELDS[self.format])
        self.weight = formats.get(self.format).dequantize(
            {field: tensors[name].a for name, field in self.FIELDS[self.format].items()}
        )

    def transform(self) -> None:
        self.transformed = True

    def __call__(self, x: T, tuning_config):
        assert self.transformed
        self.tuned.append(tuning_config["block"])
        return T((x.a.astype(np.float64) @ self.weight.T).astype(dtype("bf16").numpy))


class HummingLayerMethod:
    @classmethod
    def get_default_tuning_configs(cls, layer):
        assert layer.transformed
        return [[0, 1, {"block": 8}], [1, 16, {"block": 16}], [16, 32, {"block": 64}]]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    made = FakeTorch()
    humming, layer = ModuleType("humming"), ModuleType("humming.layer")
    humming.__version__ = "0.1.20"
    layer.HummingLayer, layer.HummingLayerMethod = HummingLayer, HummingLayerMethod
    for name, module in (("torch", made), ("humming", humming), ("humming.layer", layer)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(HummingLayer, "made", [])
    return made


@pytest.mark.parametrize(("name", "m"), [("torch.mv", 1), ("torch.mm", 1), ("torch.mm", 5)])
def test_torch_reads_bf16(torch: FakeTorch, name: str, m: int):
    held, x = stored("bf16"), rows(m)
    peer = peers.make(name, held, x, 3)
    assert (peer.name, peer.version, peer.weights, peer.kernels) == (name, "torch 2.11", "bf16", ("kernel<1>",))
    assert torch.captured == [18]  # at least 16 calls, each of three sets as often
    assert (peer.timed.name, peer.timed.calls_per_replay) == (name, 18)
    peer.timed.replay()
    assert torch.replays == 1
    assert bench_peer.result(peer, held.product(x), [1.0] * 5, [1.0] * 5, 0).wrong == ""


@pytest.mark.parametrize("scale", ["", "bf16"])
@pytest.mark.parametrize("m", [17, 64])
def test_scaled_mm_multiplies_quantized_activations(torch: FakeTorch, m: int, scale: str):
    held, x = stored("fp8", scale), rows(m)
    peer = peers.make("torch.scaled_mm", held, x, 3)
    assert (peer.name, peer.version, peer.weights) == ("torch.scaled_mm", "torch 2.11", "fp8")
    assert torch.captured == [18]
    assert bench_peer.result(peer, held.product(peer.x), [1.0] * 5, [1.0] * 5, 0).wrong == ""
    assert bench_peer.result(peer, held.product(x), [1.0] * 5, [1.0] * 5, 0).wrong != ""
    products = bench_peer.Products()
    assert not np.array_equal(products.of(held, x), products.of(held, peer.x, peer.name))


@pytest.mark.parametrize(("format", "scale"), [("nvfp4", ""), ("fp8", ""), ("fp8", "bf16")])
@pytest.mark.parametrize(("m", "block"), [(1, 8), (2, 16), (16, 16), (17, 64)])
def test_humming_reads_the_stored_tensors(torch: FakeTorch, format: str, scale: str, m: int, block: int):
    held, x = stored(format, scale), rows(m)
    peer = peers.make("humming", held, x, 6)
    assert (peer.version, peer.weights) == ("humming-kernels 0.1.20, torch 2.11", format)
    assert len(HummingLayer.made) == 6
    assert {t for layer in HummingLayer.made for t in layer.tuned} == {block}
    assert peer.timed.calls_per_replay == 18
    found = bench_peer.result(peer, held.product(x), [2.0] * 5, [1.0] * 5, 0)
    assert found.rel_l2 is not None
    assert 1e-4 < found.rel_l2 < 5e-3
    assert (found.wrong, found.weights, found.ours.speed) == ("", format, 2.0)


def test_a_peer_of_other_weights_is_told(torch: FakeTorch):
    held, x = stored("nvfp4"), rows(1)
    peer = peers.make("humming", held, x, 1)
    found = bench_peer.result(peer, -held.product(x), [2.0] * 5, [1.0] * 5, 0)
    assert found.wrong.startswith("found a relative error of 2.00e+00 against the float64 product of the nvfp4 weights")


def test_rows_that_humming_has_no_kernel_for(torch: FakeTorch):
    with pytest.raises(RuntimeError, match=r"^humming chose no kernel for 33 rows of \[256, 128\]$"):
        peers.make("humming", stored("fp8"), rows(33), 1)
    found = bench_peer.made("humming", stored("fp8"), rows(33), 1)
    assert found == (None, "peer humming: RuntimeError: humming chose no kernel for 33 rows of [256, 128]")


def test_which_weights_a_peer_reads():
    assert [peers.reads("torch.mv", f) for f in ("bf16", "nvfp4")] == ["bf16", "bf16"]
    assert [peers.reads("humming", f) for f in ("nvfp4", "fp8")] == ["nvfp4", "fp8"]
    with pytest.raises(ConfigError, match=r"^peer humming: found weights in bf16, expected nvfp4 or fp8$"):
        peers.make("humming", stored("bf16"), rows(1), 1)
    with pytest.raises(ConfigError, match=r"^peer 'huming': expected one of .*, did you mean 'humming'\?$"):
        peers.reads("huming", "fp8")


@pytest.mark.parametrize(("name", "missing"), [("torch.mv", "torch"), ("humming", "torch"), ("humming", "humming")])
def test_a_missing_package_is_one_sentence(torch: FakeTorch, monkeypatch, name: str, missing: str):
    def lacks(module: str):
        if module.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return sys.modules[module]

    for module in (peers.peer_humming, sys.modules["atlas_lab.experiments.peer_graph"]):
        monkeypatch.setattr(module, "import_module", lacks)
    with pytest.raises(ConfigError) as e:
        peers.make(name, stored("bf16" if name == "torch.mv" else "nvfp4"), rows(1), 1)
    assert str(e.value) == f"peer {name}: {missing} is not installed; pip install 'atlas-lab[peers]'"


def test_the_one_weight_of_a_checkpoint():
    tensors = stored("nvfp4").tensors
    fields = tuple((field, SimpleNamespace(name=f"w.{field}")) for field in tensors)
    held = SimpleNamespace(
        projections=[SimpleNamespace(weight=SimpleNamespace(format="nvfp4", fields=fields), n=N, k=K)],
        store=SimpleNamespace(read=lambda name: tensors[name.removeprefix("w.")]),
    )
    found = bench_peer.stored(held)
    assert (found.format, found.n, found.k, dict(found.tensors)) == ("nvfp4", N, K, tensors)
    assert found.bytes == N * K // 2 + N * K // 16 + 4
