"""wgmma: matrix products of a warpgroup that are computed as late as the programming model allows.

Until a wait returns them, accumulators are poison; until then too the bytes of the operands are under a pending read,
so that a write of them is a race. Operands in registers are copied when the product is issued.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from atlas_lab.kernels.lang.descriptor import chunks, decode
from atlas_lab.kernels.lang.fragments import Fragment, gather
from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.types import i32
from atlas_lab.simt.errors import AsyncError, DivergentCollective, PoisonRead, Unfenced
from atlas_lab.simt.operands import Operand, ProductAccess, observe
from atlas_lab.simt.source import Site, spell

if TYPE_CHECKING:
    from atlas_lab.kernels.lang.wgmma import Product
    from atlas_lab.simt.thread import SimThread
    from atlas_lab.simt.warpgroup import Warpgroup


class Chain:
    """One set of a warpgroup's accumulators, from the first product on them until a wait returns them."""

    __slots__ = ("array", "product", "site", "unfinished", "version")

    def __init__(self, array: np.ndarray | None) -> None:
        self.array = array  # [128, count], after the products computed so far; None is zero
        self.product: Product | None = None  # what the newest one multiplies
        self.site: Site | None = None
        self.unfinished = 0
        self.version = 0


class Accumulators(Sequence[Any]):
    """A thread's accumulators while products on them are in flight: not to be looked at."""

    __slots__ = ("chain", "lane", "version")

    def __init__(self, chain: Chain, lane: int) -> None:
        self.chain, self.lane, self.version = chain, lane, chain.version

    def __len__(self) -> int:
        return self.chain.product.registers if self.chain.product is not None else 0

    def _poison(self) -> NoReturn:
        thread: Any = current()
        raise thread.error(
            PoisonRead,
            f"these accumulators are read while the matrix product at {spell(self.chain.site)} is not waited for "
            "(wgmma_wait must take and return them)",
        )

    def __getitem__(self, i: Any) -> Any:
        self._poison()

    def __iter__(self) -> Iterator[Any]:
        self._poison()

    def __add__(self, other: Any) -> Any:
        self._poison()

    def __radd__(self, other: Any) -> Any:
        self._poison()


class InFlight:
    """One issued product."""

    __slots__ = ("a", "access", "b", "chain", "computed", "product", "scale")

    def __init__(
        self, product: Product, chain: Chain, a: np.ndarray | Operand, b: Operand, scale: bool, access: ProductAccess
    ) -> None:
        self.product, self.chain, self.a, self.b, self.scale, self.access = product, chain, a, b, scale, access
        self.computed = False

    def compute(self) -> None:
        p, chain = self.product, self.chain
        a = p.a_fragment(self.a) if isinstance(self.a, np.ndarray) else p.matrix(self.a.read(), p.a_transposed)
        chain.array = p.run(chain.array if self.scale else None, a, p.matrix(self.b.read(), p.b_transposed))
        self.computed = True


class Products:
    """The products of one warpgroup: those of the group being filled and the committed groups, oldest first."""

    __slots__ = ("commits", "committed", "group", "open")

    def __init__(self, group: Warpgroup) -> None:
        self.group = group
        self.open: list[InFlight] = []
        self.committed: list[list[InFlight]] = []
        self.commits = 0

    def issue(self, threads: Sequence[SimThread], args: Sequence[tuple[Any, ...]]) -> list[Accumulators]:
        """All threads are here with (product, accumulators, A, B, scale_d, fenced, commits)."""
        product, acc, a, b, scale, fenced, commits = args[0]
        first = threads[0]
        named = [("B descriptor", 3), ("scale_d", 4), ("fence before it", 5), ("number of groups before it", 6)]
        self._agree(threads, args, named if product.a_registers else [("A descriptor", 2), *named])
        self._close(commits)
        chain = self._chain(threads, product, [x[1] for x in args], scale)
        if not fenced:
            self._check_fence(first, product, acc)
        site = first.scheduler.collective
        access = ProductAccess(self.group, site)
        right = self._operand(threads, product, "B", b, product.n, product.b_transposed, access)
        left: np.ndarray | Operand
        if product.a_registers:
            left = gather([x[2] for x in args], np.uint32)
        else:
            left = self._operand(threads, product, "A", a, 64, product.a_transposed, access)
        self.open.append(InFlight(product, chain, left, right, scale, access))
        chain.product, chain.site = product, site
        chain.unfinished += 1
        chain.version += 1
        if first.scheduler.lands_early():
            self._compute()
        first.scheduler.progress += 1
        return [Accumulators(chain, lane) for lane in range(len(threads))]

    def wait(self, threads: Sequence[SimThread], args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """All threads are here with (accumulators, pending, commits): complete groups, oldest first."""
        self._agree(threads, args, [("number of groups before it", 2)])
        pending, commits = args[0][1:]
        self._close(commits)
        done = self.committed[: max(0, len(self.committed) - pending)]
        del self.committed[: len(done)]
        ends = [t.vc[t.tid] for t in threads]
        for item in (item for group in done for item in group):
            if not item.computed:
                item.compute()
            item.chain.unfinished -= 1
            item.access.finish(ends)
        threads[0].scheduler.progress += 1
        return [self._returned(t, x[0]) for t, x in zip(threads, args, strict=True)]

    @staticmethod
    def _returned(thread: SimThread, acc: Any) -> Any:
        if not isinstance(acc, Accumulators):
            return acc
        chain = acc.chain
        if acc.version != chain.version:
            raise thread.error(PoisonRead, f"this wait is handed accumulators from before {_newest(chain)}")
        if chain.unfinished or chain.array is None:
            return acc
        return Fragment(chain.array, acc.lane)

    def finish(self, thread: SimThread) -> None:
        """A thread exits. Products that were never waited for cannot have been meant."""
        left = [item for group in (*self.committed, self.open) for item in group]
        if left:
            raise thread.error(
                AsyncError,
                f"this thread exits with {len(left)} matrix products that no wgmma_wait completed",
                site=left[0].access.site,
            )

    def _agree(self, threads: Sequence[SimThread], args: Sequence[Any], named: Sequence[tuple[str, int]]) -> None:
        for what, at in named:
            expected = args[0][at]
            for t, x in zip(threads, args, strict=True):
                if x[at] != expected:
                    raise t.error(
                        DivergentCollective,
                        f"this thread has another {what} than thread {threads[0].index}: found "
                        f"{_spell(x[at])}, expected {_spell(expected)} in all of warpgroup {self.group.number}",
                        site=t.scheduler.collective,
                    )

    def _close(self, commits: int) -> None:
        """The threads committed, `commits` times so far."""
        for _ in range(commits - self.commits):
            self.committed.append(self.open)
            self.open = []
        self.commits = commits

    def _chain(self, threads: Sequence[SimThread], product: Product, accs: Sequence[Any], scale: bool) -> Chain:
        first = accs[0]
        found, expected = str(len(first)), str(product.registers)
        chain = first.chain if isinstance(first, Accumulators) else None
        if chain is not None and chain.product is not None:
            found, expected = f"{found} {chain.product.accumulator}", f"{expected} {product.accumulator}"
        if found != expected:
            raise threads[0].error(
                AsyncError,
                f"{product.name}: found {found} accumulators, expected {expected}",
                site=threads[0].scheduler.collective,
            )
        if chain is not None:
            for t, acc in zip(threads, accs, strict=True):
                if not isinstance(acc, Accumulators) or acc.chain is not chain or acc.version != chain.version:
                    raise t.error(
                        PoisonRead, f"{product.name} is handed accumulators from before {_newest(chain)}",
                        site=t.scheduler.collective,
                    )  # fmt: skip
            return chain
        if not scale:
            return Chain(None)
        return Chain(gather(accs, np.int32 if product.accumulator is i32 else np.float32))

    @staticmethod
    def _check_fence(thread: SimThread, product: Product, acc: Any) -> None:
        if product.a_registers:
            what = "A fragments"
        elif not isinstance(acc, Accumulators):
            what = "accumulators"
        elif acc.chain.product is not None and (acc.chain.product.k, acc.chain.product.n) != (product.k, product.n):
            what = "accumulators of products of another shape"
        else:
            return
        raise thread.error(
            Unfenced,
            f"{product.name} takes {what} from registers: found no wgmma_fence since the last commit or wait, expected "
            "one",
            site=thread.scheduler.collective,
        )

    def _operand(
        self,
        threads: Sequence[SimThread],
        product: Product,
        name: str,
        bits: int,
        rows: int,
        transposed: bool,
        access: ProductAccess,
    ) -> Operand:
        """The bytes that a descriptor names, checked and under a pending read."""
        first = threads[0]
        d = decode(bits)
        if d.base_offset:
            raise first.error(
                AsyncError,
                f"the descriptor of {name} has base offset {d.base_offset}, expected 0 and a matrix that starts where "
                "its swizzle repeats",
                site=access.site,
            )
        where = chunks(d, rows, transposed)
        operand = Operand(*first.block.addresses.find(first, where, f"{product.name}: operand {name}"), where.shape)
        if operand.memory.shadow is not None:
            observe(threads[::32], operand, access, name)
        return operand

    def _compute(self) -> None:
        for item in (item for group in (*self.committed, self.open) for item in group):
            if not item.computed:
                item.compute()


def _newest(chain: Chain) -> str:
    return f"the newest product on them, at {spell(chain.site)}"


def _spell(value: Any) -> str:
    return f"{value:#x}" if type(value) is int and value > 1 << 16 else str(value)
