"""A small model of a card: how long a kernel that streams weights should take, to order settings before measuring.

The time is a fixed cost, a first round trip to memory, and the largest of three:

- bandwidth: all bytes at the card's read rate, and the busiest SM's bytes at no more than PULL times its share of it;
- latency, by Little's law: an SM has its resident threads' bytes in flight and gets them once a round trip, so a block
  takes (its bytes / its bytes in flight) round trips, and blocks that do not fit at once come in whole waves;
- issue: the busiest SM's bytes times the warp instructions that each of them costs, at what the SM issues.

It orders launches of one kernel family on one card. It is no forecast: caches, DRAM pages and clocks are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf

from atlas_lab.core.target import Target
from atlas_lab.core.tensor import round_up
from atlas_lab.core.tuning import Setting

WARP = 32
# Registers are given out a warp at a time in units of 256, from the quarter of the SM that runs the warp; the driver
# keeps 1 KB of shared memory a block.
REGISTER_UNIT, QUARTERS, SHARED_RESERVED = 256, 4, 1024
# Resident blocks of an SM, by the major compute capability, where they are not 32.
BLOCKS_PER_SM = {12: 24}
# FP32 lanes of an SM, by compute capability, where they are not 128: what turns the FMA rate into a clock.
LANES = {(8, 0): 64}
LATENCY = 1300e-9  # seconds of a load while memory is busy: it orders settings as an H200 did; alike for every card
LAUNCH = 1.5e-6  # seconds of a launch inside a graph
PULL = 2.0


@dataclass(frozen=True)
class Work:
    """A launch that streams weights. `bytes` are read from device memory by all blocks together; `threads` a block,
    `registers` a thread, `in_flight` bytes of loads that a thread has outstanding at a time, `issue` warp instructions
    for each of the bytes, `shared` bytes a block."""

    bytes: int
    blocks: int
    threads: int
    registers: int
    in_flight: float
    issue: float
    shared: int = 0

    def __post_init__(self) -> None:
        for name in ("bytes", "blocks", "threads", "registers", "in_flight"):
            if getattr(self, name) <= 0:
                raise ValueError(f"chip model: found {name} {getattr(self, name)}, expected more than 0")
        if self.issue < 0 or self.shared < 0:
            raise ValueError(f"chip model: found issue {self.issue}, shared {self.shared}, expected 0 or more")


def limits(registers: int, threads: int, shared: int, target: Target) -> dict[str, int]:
    """Blocks that an SM holds at once by what limits them: `threads` a block, `registers` a thread, `shared` bytes a
    block."""
    warps = -(-threads // WARP)
    a_warp = round_up(registers * WARP, REGISTER_UNIT)
    return {
        "threads": target.threads_per_sm // (warps * WARP),
        "registers": target.registers_per_sm // QUARTERS // a_warp * QUARTERS // warps,
        "shared memory": target.shared_per_sm // round_up(shared + SHARED_RESERVED, 128),
        "blocks": BLOCKS_PER_SM.get(target.capability[0], 32),
    }


def clock(target: Target) -> float:
    """Cycles a second, from the FMA rate."""
    return target.math["fma"].value / (2 * LANES.get(target.capability, 128) * target.sms)


def seconds(work: Work, target: Target) -> float:
    """Predicted seconds of a launch; infinite where not one block fits an SM."""
    resident = min(limits(work.registers, work.threads, work.shared, target).values())
    if resident < 1:
        return inf
    a_block = work.bytes / work.blocks
    busiest = ceil(work.blocks / target.sms) * a_block
    waves = ceil(work.blocks / (target.sms * resident))
    share = target.read_rate.value / target.sms
    bandwidth = max(work.bytes / target.read_rate.value, busiest / (PULL * share))
    latency = waves * LATENCY * a_block / (work.threads * work.in_flight)
    issue = busiest * work.issue / (QUARTERS * clock(target))
    return LAUNCH + LATENCY + max(bandwidth, latency, issue)


def ranked(settings: Iterable[tuple[Setting, Work]], target: Target) -> tuple[Setting, ...]:
    """Settings that fit the card, fastest by the model first; equal ones as they came."""
    timed = [(seconds(work, target), s) for s, work in settings]
    return tuple(s for time, s in sorted((t for t in timed if t[0] < inf), key=lambda t: t[0]))
