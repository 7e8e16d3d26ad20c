"""Launch every kernel of arms once, on small shapes in one process: what compute-sanitizer watches.

compute-sanitizer --tool racecheck --error-exitcode 9 python tools/sanitize.py 'nvfp4_mma*' q4k_mma
"""

from __future__ import annotations

import sys
import time

from atlas_lab.core.arm import kernels_of
from atlas_lab.core.registry import load_registry
from atlas_lab.experiments import parity
from atlas_lab.experiments.case import base_context, target_for
from atlas_lab.experiments.cases import cases, launched
from atlas_lab.experiments.settings import chosen_arms
from atlas_lab.kernels.lang import Kernel
from atlas_lab.runtime.device import open_device


def main(*patterns: str) -> int:
    begin, wrong = time.monotonic(), []
    registry = load_registry()
    peers = {e.arm.name: e.arm for e in registry.entries}
    with open_device("cuda") as device:
        for arm in chosen_arms(registry, patterns):
            target = target_for(arm, device.target)
            base, seen = base_context(target), set[Kernel]()
            for case in cases(arm, target=target):
                if found := set(launched(case, arm, base)) - seen:
                    seen |= found
                    result = parity.run_case(case, arm, device, base, peers)
                    wrong += [] if result.ok else [f"{case}: {result.sentence}"]
            of = len(set(kernels_of(arm)))
            print(f"{arm.name}: {len(seen)} of {of} kernels, {time.monotonic() - begin:.0f} s", flush=True)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
