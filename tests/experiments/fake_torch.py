"""As much of torch as peers call, on NumPy: every tensor is an array in the dtype it stands for."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import ml_dtypes
import numpy as np


class T:
    def __init__(self, a: np.ndarray) -> None:
        self.a = a

    def to(self, device):
        return self

    def view(self, dtype):
        return T(self.a.view(dtype))

    def reshape(self, shape):
        return T(self.a.reshape(shape))

    def clone(self):
        return T(self.a.copy())

    def float(self):
        return T(self.a.astype(np.float32))

    def cpu(self):
        return self

    def numpy(self):
        return self.a

    def __getitem__(self, i):
        return T(self.a[i])

    @property
    def T(self):  # noqa: N802
        return T(self.a.T)


def wide(t: T) -> np.ndarray:
    return t.a.astype(np.float64)


class FakeTorch:
    """`captured` counts the calls of each graph, `replays` replays."""

    __version__ = "2.11"
    bfloat16, float8_e4m3fn = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
    uint8, float32 = np.uint8, np.float32

    def __init__(self) -> None:
        self.calls, self.captured, self.replays = 0, [], 0
        kinds = SimpleNamespace(BlockWise1x128="1x128", BlockWise128x128="128x128")
        self.nn = SimpleNamespace(functional=SimpleNamespace(ScalingType=kinds, scaled_mm=self.scaled_mm))
        self.cuda = SimpleNamespace(
            Stream=lambda: SimpleNamespace(cuda_stream=7),
            stream=lambda s: nullcontext(),
            synchronize=lambda: None,
            CUDAGraph=self.graph_class(),
            graph=self.capture,
        )
        events = [
            SimpleNamespace(name="host", device_type="DeviceType.CPU"),
            SimpleNamespace(name="kernel<1>", device_type="DeviceType.CUDA"),
        ]
        self.profiler = SimpleNamespace(
            profile=lambda activities: nullcontext(SimpleNamespace(events=lambda: events)),
            ProfilerActivity=SimpleNamespace(CUDA="cuda"),
        )

    def graph_class(self):
        def replay():
            self.replays += 1

        return lambda: SimpleNamespace(replay=replay)

    @contextmanager
    def capture(self, graph, stream):
        before = self.calls
        yield
        self.captured.append(self.calls - before)

    def device(self, name):
        return name

    def from_numpy(self, a):
        return T(a)

    def mv(self, a, b):
        self.calls += 1
        return T((wide(a) @ wide(b)).astype(ml_dtypes.bfloat16))

    def mm(self, a, b):
        self.calls += 1
        return T((wide(a) @ wide(b)).astype(ml_dtypes.bfloat16))

    def scaled_mm(self, a, b, of_a, kind_a, of_b, kind_b, output_dtype):
        """a [M, K], b [K, N] with contiguous K; scales [M, K/128] with contiguous M and [K/128, N/128]."""
        assert (kind_a, kind_b, output_dtype) == ("1x128", "128x128", self.bfloat16)
        assert of_a.a.strides[0] == of_b.a.strides[0] == 4
        assert a.a.dtype == b.a.dtype == ml_dtypes.float8_e4m3fn
        self.calls += 1
        x = wide(a) * np.repeat(of_a.a, 128, axis=1)
        return T((x @ (wide(b) * np.repeat(np.repeat(of_b.a, 128, 0), 128, 1))).astype(ml_dtypes.bfloat16))
