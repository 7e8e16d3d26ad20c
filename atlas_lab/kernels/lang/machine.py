"""The interpreter's side of an intrinsic: what it may ask of the simulated thread that runs it.

`simt` implements `Thread`; a call of an intrinsic from Python finds the current one through the greenlet it
runs in. Pure intrinsics never ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from greenlet import getcurrent

from atlas_lab.kernels.lang.types import Pointer, Scalar


class Dim3(Protocol):
    x: int
    y: int
    z: int


class Thread(Protocol):
    """One simulated CUDA thread. Indexes are in elements of the pointer's dtype; `unit` is what one register
    receives, `count` how many; an access is `unit.bytes * count` wide and must be aligned to that.

    `order` is PTX's memory order. "weak": an ordinary access. "relaxed" (also volatile), "acquire", "release",
    "acq_rel": strong accesses, which never race with one another and are scheduling points by themselves, so
    their intrinsics need no `yield_`. Acquire and release order memory; relaxed ones do with a `fence` beside
    them."""

    lane: int
    warp: int
    threadIdx: Dim3  # noqa: N815
    blockIdx: Dim3  # noqa: N815
    blockDim: Dim3  # noqa: N815
    gridDim: Dim3  # noqa: N815

    def read(self, p: Pointer, index: int, unit: Scalar, count: int, order: str = "weak") -> tuple[Any, ...]:
        """Values as Python integers (f32: numpy.float32). Checks bounds, alignment, initialisation, races."""

    def write(self, p: Pointer, index: int, unit: Scalar, values: Sequence[Any], order: str = "weak") -> None:
        """Checks bounds, alignment, races; a write through an `In` pointer is an error."""

    def update(self, p: Pointer, index: int, unit: Scalar, change: Callable[[Any], Any], order: str = "relaxed") -> Any:
        """Atomic read-modify-write; returns the old value. A scheduling point. PTX's default is relaxed."""

    def yield_(self, reason: str) -> None:
        """A scheduling point without a condition (sleep): no progress by itself."""

    def warp_op(
        self, name: str, mask: int, arg: Any, combine: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
    ) -> Any:
        """Rendezvous of the lanes in `mask` at the same intrinsic; `combine(threads, args)` runs once and
        returns one result a lane, in ascending lane order. Orders memory among the lanes. A lane that
        exited or waits elsewhere is reported."""

    def barrier(self, ident: int, count: int | None) -> None:
        """bar.sync: `count` threads (None: all of the block's) meet at barrier `ident`."""

    def arrive(self, ident: int, count: int) -> None:
        """bar.arrive: count towards barrier `ident` without waiting."""

    def copy_async(self, dst: Pointer, dst_index: int, src: Pointer, src_index: int, size: int, valid: int) -> None:
        """cp.async of `size` bytes to shared memory; the bytes past `valid` become zero and are not read.
        Destination bytes are poison until the copying thread waits for the group."""

    def commit_async(self) -> None:
        """cp.async.commit_group."""

    def wait_async(self, pending: int) -> None:
        """cp.async.wait_group: all but the newest `pending` groups of this thread are complete."""

    def shared(self, site: Any, dtype: Scalar, count: int, align: int) -> Pointer:
        """Static shared memory of a call site, the same for every thread of the block."""

    def dynamic_shared(self, dtype: Scalar, offset: int) -> Pointer:
        """The launch's dynamic shared memory, from byte `offset`."""

    def shared_address(self, p: Pointer, index: int) -> int:
        """The address of an element in the block's shared memory, which must be a multiple of 16."""

    def wgmma(self, product: Any, acc: Any, a: Any, b: int, scale_d: int) -> Any:
        """Issue a product (`wgmma.Product`) with the whole warpgroup; the result is not to be read before its wait."""

    def wgmma_fence(self) -> None:
        """Registers written so far may be operands of products."""

    def wgmma_commit(self) -> None:
        """Close the warpgroup's group of products."""

    def wgmma_wait(self, acc: Any, pending: int) -> Any:
        """All but the newest `pending` groups are complete; `acc` back, readable if its products are."""

    def set_max_registers(self, count: int, way: str) -> None:
        """setmaxnreg, `inc` or `dec`, with the whole warpgroup."""

    def fence(self, scope: str) -> None:
        """membar: orders this thread's earlier accesses before its later ones at `block` or `gpu` scope."""

    def grid_wait(self) -> None:
        """griddepcontrol.wait: the launches before this one are over; nothing in a launch that is not dependent."""

    def launch_dependents(self) -> None:
        """griddepcontrol.launch_dependents: the next launch may start once every block called this or exited."""

    cluster_rank: int
    cluster_size: int

    def fence_proxy(self, spaces: tuple[str, ...]) -> None:
        """fence.proxy.async: this thread's earlier writes of `shared` or `global` memory come before async reads."""

    def fence_mbarrier_init(self) -> None:
        """fence.mbarrier_init: the mbarriers that this thread initialised may be used by cluster and copy engine."""

    def mbarrier_init(self, p: Pointer, index: int, count: int) -> None:
        """A new mbarrier in phase 0."""

    def mbarrier_inval(self, p: Pointer, index: int) -> None:
        """The mbarrier is over."""

    def mbarrier_arrive(self, p: Pointer, index: int, expected: int, relaxed: bool = False) -> None:
        """Expect more bytes, then count one arrival; releases. `p` may be of another block of the cluster."""

    def mbarrier_expect_tx(self, p: Pointer, index: int, expected: int) -> None:
        """Expect more bytes in the current phase."""

    def mbarrier_try_wait(self, p: Pointer, index: int, parity: int) -> bool:
        """Whether the phase of this parity is complete; acquires if so. A scheduling point."""

    def mbarrier_wait(self, p: Pointer, index: int, parity: int, scope: str) -> None:
        """Until the phase of this parity is complete; acquires from the `block` or the `cluster`."""

    def bulk_load(
        self, dst: Pointer, i: int, src: Pointer, j: int, size: int, bar: Pointer, k: int, mask: int | None
    ) -> None:
        """cp.async.bulk to shared memory, of this block or of those in `mask`. Its bytes are poison until a thread
        waits for the phase of the mbarrier that counts them."""

    def store_async(self, dst: Pointer, i: int, values: Sequence[Any], bar: Pointer, k: int) -> None:
        """st.async of four f32 to another block of the cluster. They are poison there until a thread waits for the
        phase of that block's mbarrier, which counts their bytes."""

    def bulk_store(self, dst: Pointer, i: int, src: Pointer, j: int, size: int) -> None:
        """cp.async.bulk to global memory, in the thread's open group."""

    def bulk_commit(self) -> None:
        """cp.async.bulk.commit_group."""

    def bulk_wait(self, pending: int, read: bool) -> None:
        """cp.async.bulk.wait_group, or with `read` .read: all but the newest `pending` groups."""

    def tma_load(
        self, dst: Pointer, i: int, source: Pointer, at: Sequence[int], bar: Pointer, k: int, mask: int | None
    ) -> None:
        """cp.async.bulk.tensor to shared memory: the box at coordinates `at`, in the order of the view's shape."""

    def tma_store(self, target: Pointer, at: Sequence[int], src: Pointer, i: int) -> None:
        """cp.async.bulk.tensor to global memory."""

    def tma_prefetch(self, m: Pointer) -> None:
        """prefetch.tensormap."""

    def cluster_arrive(self, release: bool) -> None:
        """barrier.cluster.arrive."""

    def cluster_wait(self) -> None:
        """barrier.cluster.wait; acquires."""

    def mapa(self, p: Pointer, rank: int) -> Pointer:
        """The same place in another block of the cluster."""


def current() -> Thread:
    """The simulated thread that runs now; raises RuntimeError outside the interpreter."""
    try:
        thread: Thread = getcurrent().thread
    except AttributeError:
        raise RuntimeError("a kernel intrinsic that needs a thread was called outside the interpreter") from None
    return thread
