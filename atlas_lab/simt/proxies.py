"""Proxies: what threads wrote by ordinary accesses and the async proxy (copy engine, matrix unit) reads or writes next.

The writing thread must fence (`fence_proxy_async`) after its write; that the issuing thread then knows of the write is
the shadow's business. Copies by the async proxy itself need no fence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atlas_lab.simt.errors import MissingFence

if TYPE_CHECKING:
    from atlas_lab.simt.accesses import Accesses
    from atlas_lab.simt.memory import Memory
    from atlas_lab.simt.shadow import Access

NAMES = {"shared": "fence_proxy_async", "global": "fence_proxy_async_global"}


class Fences:
    """The epochs in which a thread fenced last, by memory space: the async proxy sees its writes up to them."""

    __slots__ = ("epochs",)

    def __init__(self) -> None:
        self.epochs = dict.fromkeys(NAMES, 0)

    def cover(self, access: Access, space: str) -> bool:
        return access.clock <= self.epochs[space]


def check_proxy(thread: Accesses, memory: Memory, at: int, width: int, doing: str = "copy engine reads") -> None:
    """Report bytes [at, at + width), which the async proxy accesses now, if a thread wrote them and did not fence."""
    shadow = memory.shadow
    if shadow is None:
        return
    last: Access | None = None
    for a in shadow.writes[at >> shadow.shift : (at + width - 1 >> shadow.shift) + 1]:
        if a is last or a is None or a.engine:
            continue
        last = a
        if not a.pending and not a.thread.fences.cover(a, memory.space):
            raise thread.error(
                MissingFence,
                f"the {doing} bytes [{at}, {at + width}) of {memory}, which {a.spell(thread)} wrote without "
                f"{NAMES[memory.space]} after it",
                memory=memory,
            )
