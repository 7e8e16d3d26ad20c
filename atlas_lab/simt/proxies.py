"""Proxies: what threads wrote by ordinary accesses and the async proxy (copy engine, matrix unit) reads or writes next.

The writing thread must fence (`fence_proxy_async`) after its write and before whatever tells the issuing thread of it.
Writes by the async proxy itself need no fence.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from atlas_lab.simt.errors import Unfenced

if TYPE_CHECKING:
    from atlas_lab.simt.accesses import Accesses
    from atlas_lab.simt.memory import Memory
    from atlas_lab.simt.shadow import Access


def fenced(a: Access, reader: Accesses, space: str) -> bool:
    """Whether the async proxy, asked by `reader`, sees a write: the thread that made it fenced, and `reader` knows."""
    if a.asynchronous:
        return True
    writer = a.thread
    fences = writer.proxy_fences if space == "shared" else writer.proxy_fences_global
    i = bisect_left(fences, a.clock)
    if i == len(fences):
        return False
    return writer.block is not reader.block or fences[i] <= reader.vc[writer.tid]


def check_proxy(thread: Accesses, memory: Memory, at: int, width: int, doing: str = "copy engine reads") -> None:
    """Report bytes [at, at + width), which the async proxy accesses now, if a thread wrote them and did not fence."""
    shadow = memory.shadow
    if shadow is None:
        return
    last: Access | None = None
    for a in shadow.writes[at >> shadow.shift : (at + width - 1 >> shadow.shift) + 1]:
        if a is last or a is None:
            continue
        last = a
        if not a.pending and not fenced(a, thread, memory.space):
            fence = "fence_proxy_async" + "_global" * (memory.space == "global")
            raise thread.error(
                Unfenced,
                f"the {doing} bytes [{at}, {at + width}) of {memory}, which {a.spell(thread)} wrote: found no {fence} "
                "of that thread between the write and what passed it on, expected one",
                memory=memory,
            )
