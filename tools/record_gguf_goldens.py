"""Record what ggml and its gguf package compute for our block formats, for tests/formats/test_formats_ggml_goldens.py.

Recorded with gguf 0.19.0 (values of blocks) and the ggml sources of llama-cpp-python 0.3.36 (quantizers). To record
again, from the repository root, with a C compiler:

    python3.11 -m venv /tmp/peers
    /tmp/peers/bin/pip install gguf==0.19.0 'numpy<2.5'
    cd /tmp && /tmp/peers/bin/pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    /tmp/peers/bin/python tools/record_gguf_goldens.py /tmp/llama_cpp_python-0.3.36/vendor/llama.cpp/ggml

Weights and blocks are recorded too: no random stream has to stay the same. `values` and `weights` make fresh ones for
tests/peers/test_gguf_live.py.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "gguf"
Arrays = dict[str, np.ndarray]

# Format: name in ggml, weights and bytes of a block, where its f16 scales are.
TYPES = {
    "q8_0": ("Q8_0", 32, 34, (0,)),
    "q4_k": ("Q4_K", 256, 144, (0, 2)),
    "q6_k": ("Q6_K", 256, 210, (208,)),
    "block_nvfp4": ("NVFP4", 64, 36, ()),
}
QUANTIZERS = {
    "q8_0": ("quantize_row_q8_0_ref", 32, 34),
    "q4_k": ("quantize_row_q4_K_ref", 256, 144),
    "q6_k": ("quantize_row_q6_K_ref", 256, 210),
    "q2_0_g64": ("quantize_row_q2_0_ref", 64, 18),
    "q2_0_g128": ("quantize_row_q2_0_ref", 128, 34),
}
# What ggml-quants.c refers to outside the functions that are called.
STUBS = """
#include <stdlib.h>
#include <stdint.h>
void ggml_abort(const char *f, int l, const char *s, ...) { (void)f; (void)l; (void)s; abort(); }
size_t ggml_row_size(int t, int64_t n) { (void)t; (void)n; abort(); }
size_t ggml_type_size(int t) { (void)t; abort(); }
const char *ggml_type_name(int t) { (void)t; abort(); }
void ggml_log_internal(int l, const char *s, ...) { (void)l; (void)s; }
float ggml_table_f32_f16[1 << 16];
"""


def weights(seed: int) -> Arrays:
    """Float32 `[N, 256 m]`: usual weights, heavy tails, and rows at which the searches for scales do odd things."""
    rng = np.random.default_rng(seed)
    sign = rng.choice([-1, 1], 256)
    base = np.repeat(-(10.0 ** rng.uniform(-3, 2, 8)), 32).astype(np.float32)
    awkward = [
        np.zeros(256),
        np.ones(256),
        -np.ones(256),  # nothing above 0 and no range
        -np.abs(rng.normal(1, 0.1, 256)),  # the fitted minimum passes the largest weight
        np.abs(rng.normal(1, 1e-4, 256)),
        np.nextafter(base, np.where(sign > 0, base, np.float32(-1e9))),  # ranges of one step of a float
        rng.integers(-8, 8, 256),  # ties
        rng.integers(-3, 4, 256) * 2.0**-20,
        rng.normal(0, 1, 256) * 10.0 ** rng.uniform(-44, -5, 256),  # scales below f16
        rng.normal(0, 1, 256) * 10.0 ** rng.uniform(-10, 3, 256),
        rng.normal(0, 0.02, 256) * (rng.random(256) < 0.02),  # groups of zeros
        rng.normal(0, 1.5e4, 256),  # a scale of Q2_0 near the largest f16
        np.where(np.arange(256) == 77, 1.0, 1e-16),
    ]
    return {
        "usual": rng.normal(0, 0.02, (8, 512)).astype(np.float32),
        "heavy": (rng.standard_t(2, (16, 256)) * 10.0 ** rng.uniform(-4, 2, (16, 1))).astype(np.float32),
        "awkward": np.stack(awkward).astype(np.float32),
    }


def blocks(seed: int) -> Arrays:
    """Random bytes as blocks of each type, u8 `[8, 6 blocks]`, with finite scales; bf16 as u16 `[8, 64]`."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, (_, _, size, scales) in TYPES.items():
        b = rng.integers(0, 256, (8, 6, size), dtype=np.uint8)
        for at in scales:  # exponents 0 to 29: subnormal to large
            b[..., at + 1] = rng.integers(0, 0x78, (8, 6)) | rng.integers(0, 2, (8, 6)) << 7
        if name == "block_nvfp4":
            b[..., :4] &= 0x7F
            b[0, 0, :4] = 0x00, 0x01, 0x7E, 0x7F
        out[name] = b.reshape(8, -1)
    out["bf16"] = (
        rng.integers(0, 0x7F80, (8, 64)).astype(np.uint16) | rng.integers(0, 2, (8, 64)).astype(np.uint16) << 15
    )
    return out


def values(given: Arrays) -> Arrays:
    """Float32 values of `blocks` by gguf's own dequantization."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    out = {name: dequantize(given[name], GGMLQuantizationType[TYPES[name][0]]) for name in TYPES}
    return out | {"bf16": dequantize(given["bf16"].view(np.uint8), GGMLQuantizationType.BF16)}


def quantized(given: Arrays, library: Callable[[str], ctypes.CDLL]) -> Arrays:
    """Blocks of each of `weights` in each format that `library` (by format) quantizes to: `heavy.q4_k`."""
    out = {}
    for form, (name, block, size) in QUANTIZERS.items():
        function = getattr(library(form), name)
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        for kind, w in given.items():
            made = np.zeros((w.shape[0], w.shape[1] // block * size), np.uint8)
            function(np.ascontiguousarray(w).ctypes.data, made.ctypes.data, w.size)
            out[f"{kind}.{form}"] = made
    return out


def build(ggml: Path, folder: Path, group: int) -> ctypes.CDLL:
    """ggml's quantizers as a shared library, Q2_0 in groups of `group`; no contraction, as in its released builds."""
    source = folder / f"src{group}"
    source.mkdir()
    for name in ("ggml-quants.c", "ggml-quants.h", "ggml-common.h", "ggml-impl.h", "ggml-cpu/ggml-cpu-impl.h"):
        text = (ggml / "src" / name).read_text().replace("#define QK2_0 64", f"#define QK2_0 {group}")
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    (source / "stubs.c").write_text(STUBS)
    made = folder / f"quants{group}.so"
    flags = ["-O2", "-DNDEBUG", "-w", "-shared", "-fPIC", "-ffp-contract=off", f"-I{source}", f"-I{ggml / 'include'}"]
    sources = [source / "ggml-quants.c", source / "stubs.c"]
    subprocess.run(["cc", *flags, "-o", made, *sources, "-lm"], check=True)
    return ctypes.CDLL(str(made))


def save(name: str, arrays: Arrays, *versions: str) -> None:
    np.savez_compressed(GOLDEN / f"{name}.npz", allow_pickle=False, versions=np.array(versions), **arrays)


def main(ggml: Path) -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    given, random = weights(seed=2026), blocks(seed=2026)
    save("weights", given)
    save("blocks", random)
    save("gguf", values(random), f"gguf {version('gguf')}")
    with tempfile.TemporaryDirectory() as folder:
        libraries = {group: build(ggml, Path(folder), group) for group in (64, 128)}
        made = quantized(given, lambda form: libraries[128 if form == "q2_0_g128" else 64])
    save("ggml", made, "ggml of llama-cpp-python 0.3.36")
    for path in sorted(GOLDEN.glob("*.npz")):
        print(f"{path.name:12s} {path.stat().st_size:7d} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
