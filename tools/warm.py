"""Compile the kernels of arms for one architecture on all cores, into the compile cache.

python tools/warm.py sm_90a 'nvfp4_*' bf16_mma
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch

from atlas_lab.arms import atlas_arms
from atlas_lab.core.arm import kernels_of
from atlas_lab.kernels.lang import KernelError, compile_kernel


def _compiled(arch: str, name: str, index: int) -> str:
    """What went wrong; empty if nothing did."""
    arm = next(a for a in atlas_arms() if a.name == name)
    try:
        compile_kernel(kernels_of(arm)[index], arch)
    except KernelError as e:
        return str(e)
    return ""


def main(arch: str, *patterns: str) -> int:
    begin, todo = time.monotonic(), {}
    for arm in atlas_arms():
        if any(fnmatch(arm.name, p) for p in patterns):
            for index, kernel in enumerate(kernels_of(arm)):
                todo.setdefault(kernel, (arch, arm.name, index))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        wrong = [w for w in pool.map(_compiled, *zip(*todo.values(), strict=True)) if w]
    print(f"{len(todo)} kernels, {time.monotonic() - begin:.0f} s", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
