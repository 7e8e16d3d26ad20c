"""The disk cache of cubins, and the fingerprints that lead to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atlas_lab.kernels import lang as L
from atlas_lab.kernels.lang import cache
from atlas_lab.kernels.lang import compile as compiling
from atlas_lab.kernels.lang.fingerprint import fingerprint

pytestmark = pytest.mark.usefixtures("compiler")
FACTOR = 3


def fresh(value: int) -> L.Kernel:
    """A kernel no test has compiled: not in memory."""

    @L.kernel
    def kernel(y: L.Out[L.u32]):
        L.stg_b32(y, 0, value)

    return kernel


@L.kernel
def tripled(y: L.Out[L.u32], v: L.u32):
    L.stg_b32(y, 0, v * FACTOR)


class TestCache:
    @pytest.fixture(autouse=True)
    def own(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ATLAS_LAB_CACHE", str(tmp_path))
        self.path = tmp_path / "cubin"

    def count(self, monkeypatch) -> dict[str, int]:
        counts = {"lowered": 0, "linked": 0}
        for name, function in (("lowered", "_ltoir"), ("linked", "_link")):
            original = getattr(compiling, function)

            def counted(*args, _original=original, _name=name, **kwargs):
                counts[_name] += 1
                return _original(*args, **kwargs)

            monkeypatch.setattr(compiling, function, counted)
        return counts

    def test_a_known_kernel_is_neither_lowered_nor_linked(self, monkeypatch):
        counts = self.count(monkeypatch)
        first = L.compile_kernel(fresh(1), "sm_80")
        assert counts == {"lowered": 1, "linked": 2}
        again = L.compile_kernel(fresh(1), "sm_80")
        assert counts == {"lowered": 1, "linked": 2}
        assert again == first
        assert L.compile_kernel(fresh(1), "sm_90a").cubin != first.cubin
        assert sorted(p.suffix for p in self.path.iterdir()) == [".cubin", ".cubin", ".key", ".key"]

    def test_another_value_is_another_kernel(self, monkeypatch):
        counts = self.count(monkeypatch)
        assert L.compile_kernel(fresh(1), "sm_80").cubin != L.compile_kernel(fresh(2), "sm_80").cubin
        assert counts["lowered"] == 2

    @pytest.mark.parametrize("damage", [b"", b"{}\n", b"not json\n\x7fELF", None])
    def test_a_damaged_entry_is_rebuilt(self, monkeypatch, damage):
        counts = self.count(monkeypatch)
        first = L.compile_kernel(fresh(3), "sm_80")
        (entry,) = self.path.glob("*.cubin")
        entry.write_bytes(entry.read_bytes()[:-1] if damage is None else damage)
        assert L.compile_kernel(fresh(3), "sm_80").cubin == first.cubin
        assert counts == {"lowered": 2, "linked": 4}
        assert L.compile_kernel(fresh(3), "sm_80").cubin == first.cubin
        assert counts["lowered"] == 2

    def test_a_damaged_lead_is_replaced(self, monkeypatch):
        L.compile_kernel(fresh(4), "sm_80")
        (lead,) = self.path.glob("*.key")
        lead.write_text("0" * 64)
        counts = self.count(monkeypatch)
        L.compile_kernel(fresh(4), "sm_80")
        assert counts == {"lowered": 1, "linked": 0}
        L.compile_kernel(fresh(4), "sm_80")
        assert counts["lowered"] == 1

    def test_a_directory_that_cannot_be_written_is_no_error(self, monkeypatch, tmp_path):
        blocked = tmp_path / "file"
        blocked.write_text("")
        monkeypatch.setenv("ATLAS_LAB_CACHE", str(blocked))
        assert L.compile_kernel(fresh(5), "sm_80").registers > 0

    def test_where_it_is(self, monkeypatch, tmp_path):
        assert cache.directory() == tmp_path
        monkeypatch.delenv("ATLAS_LAB_CACHE")
        assert cache.directory() == Path.home() / ".cache" / "atlas-lab"


class TestFingerprint:
    @staticmethod
    def of(factory, *args) -> str | None:
        return fingerprint(factory(*args), "sm_80")

    def test_sees_closures_globals_helpers_and_intrinsics(self, monkeypatch):
        def through(value):
            @L.device
            def helper():
                return L.u32(value)

            @L.kernel
            def kernel(y: L.Out[L.u32]):
                L.stg_b32(y, 0, helper())

            return kernel

        def intrinsics(text):
            op = L.intrinsic("op", (L.u32,), L.u32, ptx=text)

            @L.kernel
            def kernel(y: L.Out[L.u32]):
                L.stg_b32(y, 0, op(1))

            return kernel

        def lowered(count):
            def emit(e, v):
                return [e.u32("not.b32 $0, $1;", v) for _ in range(count)].pop()

            op = L.intrinsic("op", (L.u32,), L.u32, ptx=emit)

            @L.kernel
            def kernel(y: L.Out[L.u32]):
                L.stg_b32(y, 0, op(1))

            return kernel

        assert self.of(lowered, 1) == self.of(lowered, 1)
        assert self.of(lowered, 1) != self.of(lowered, 2)
        assert self.of(through, 1) == self.of(through, 1)
        assert self.of(through, 1) != self.of(through, 2)
        assert self.of(intrinsics, "mov.b32 $0, $1;") != self.of(intrinsics, "not.b32 $0, $1;")
        before = fingerprint(tripled, "sm_80")
        assert before != fingerprint(tripled, "sm_90a")
        monkeypatch.setitem(globals(), "FACTOR", 4)
        assert fingerprint(tripled, "sm_80") != before

    def test_gives_none_for_what_it_does_not_know(self):
        def unknown(value):
            @L.kernel
            def kernel(y: L.Out[L.u32]):
                L.stg_b32(y, 0, value)

            return kernel

        assert self.of(unknown, object()) is None
        assert self.of(unknown, np.zeros(2)) is None
        assert self.of(unknown, (1, 2.5, "a", None, L.bf16)) is not None
