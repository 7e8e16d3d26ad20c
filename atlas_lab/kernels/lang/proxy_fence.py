"""Proxy fences: what ordinary accesses wrote, made visible to the async proxy (copy engine, matrix unit's operands).

Each writing thread fences after its writes; then a barrier tells the thread that issues the copy or the product.
"""

from __future__ import annotations

from atlas_lab.kernels.lang.machine import current
from atlas_lab.kernels.lang.op import SM90, Effect, Op

_FENCE = "9.7.13.4 fence.proxy.async"


def _fence(name: str, spaces: tuple[str, ...], suffix: str) -> Op:
    def run() -> None:
        current().fence_proxy(spaces)

    run.__doc__ = f"This thread's earlier accesses of {' and '.join(spaces)} memory come before later async ones."
    return Op(
        name,
        (),
        None,
        ptx=f"fence.proxy.async{suffix};",
        numpy=run,
        effect=Effect.SYNC,
        needs=SM90,
        section=_FENCE,
    )


fence_proxy_async = _fence("fence_proxy_async", ("shared",), ".shared::cta")
fence_proxy_async_global = _fence("fence_proxy_async_global", ("global",), ".global")
fence_proxy_async_all = _fence("fence_proxy_async_all", ("shared", "global"), "")
