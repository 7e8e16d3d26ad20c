"""From a kernel to LLVM modules through Numba-CUDA, without a driver. Imported only when something is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from numba.cuda import dispatcher as numba_dispatcher
from numba.cuda import types
from numba.cuda.compiler import compile_extra, kernel_fixup
from numba.cuda.core.callconv import CUDACallConv
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.core.errors import TypingError
from numba.cuda.cudadrv import nvvm
from numba.cuda.descriptor import cuda_target
from numba.cuda.extending import typeof_impl
from numba.cuda.flags import CUDAFlags
from numba.cuda.utils import numba_target_override

from atlas_lab.kernels.lang import byvalue
from atlas_lab.kernels.lang.kernel import DeviceFunction, Kernel
from atlas_lab.kernels.lang.lower import parameter_type
from atlas_lab.kernels.lang.pipeline import Pipeline, quick

Capability = tuple[int, int, str]


class _Flags(CUDAFlags):  # type: ignore[misc]
    """Flags that are compared by what was set: Numba compares them for each call that it types, by every option there
    is, and hashes them by their names alone."""

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Flags) and self._values == other._values)

    def __hash__(self) -> int:
        return hash(_Flags)


def _compile(function: Any, args: Any, return_type: Any, cc: Capability, forceinline: bool) -> Any:
    """Numba's compilation result, lowered to LLVM but no further."""
    flags = _Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.inline = "never"
    flags.error_model = "numpy"
    flags.forceinline = forceinline
    flags.nvvm_options = {"opt": 3}
    flags.compute_capability = cc
    context = cuda_target.target_context
    with numba_target_override():
        result = compile_extra(
            typingctx=cuda_target.typing_context,
            targetctx=context,
            func=function,
            args=args,
            return_type=return_type,
            flags=flags,
            locals={},
            pipeline_class=Pipeline,
            call_conv=CUDACallConv(context),
        )
    result.library.finalize()
    result.fndesc.typemap = result.fndesc.calltypes = None  # they would keep its IR
    return result


class _DeviceDispatcher(numba_dispatcher.CUDADispatcher):  # type: ignore[misc]
    """A device function compiled with this pipeline, always inlined. Its LLVM does not depend on the architecture."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Once for all values of an integer argument, unless the body needs to know them when compiling."""
        general = tuple(types.unliteral(a) for a in args)
        try:
            return super().get_call_template(general, kws)
        except TypingError:
            if general == tuple(args):
                raise
            return super().get_call_template(args, kws)

    def compile_device(self, args: Any, return_type: Any = None) -> Any:
        if args not in self.overloads:
            made = _compile(self.py_func, args, return_type, (8, 0, ""), forceinline=True)
            self.overloads[args] = made
            made.target_context.insert_user_function(made.entry_point, made.fndesc, [made.library])
        return self.overloads[args]


_DEVICE: dict[DeviceFunction, Any] = {}


@typeof_impl.register(DeviceFunction)  # type: ignore[untyped-decorator]
def _typeof_device(value: DeviceFunction, c: Any) -> Any:
    if value not in _DEVICE:
        _DEVICE[value] = _DeviceDispatcher(value.function, {"device": True, "forceinline": True})
    return cuda_target.typing_context.resolve_value_type(_DEVICE[value])


@contextmanager
def _without_driver(cc: Capability) -> Iterator[None]:
    """Numba asks the current device for its capability when a kernel calls a `cuda.jit(device=True)` function."""
    saved = numba_dispatcher.get_current_device
    numba_dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    try:
        yield
    finally:
        numba_dispatcher.get_current_device = saved


class _Printed:
    """A device function's module as text, for the kernels that link it from then on."""

    functions = ()

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


# LLVM of the kernels of this language: intrinsics are assembly, so that it does not depend on the architecture.
_MODULES: dict[Kernel, list[str]] = {}


def llvm_modules(kernel: Kernel, cc: Capability) -> list[str]:
    """LLVM IR of a kernel, its own module first, then those of its device functions; lowered once.

    The same source gives the same text in every process: symbols are numbered by first use, the kernel's is
    `kernel.entry`. Raises Numba's errors.
    """
    if kernel.dispatcher is not None:
        modules: list[str] = _lowered(kernel, cc)
        return modules
    if kernel not in _MODULES:
        _MODULES[kernel] = _lowered(kernel, cc)
    return _MODULES[kernel]


@global_compiler_lock  # type: ignore[untyped-decorator]
def _lowered(kernel: Kernel, cc: Capability) -> list[str]:
    args = tuple(parameter_type(p) for p in kernel.params)
    with _without_driver(cc), quick():
        result = _compile(kernel.function, args, types.void, cc, forceinline=False)
    library = result.library
    name = result.fndesc.llvm_func_name
    function = library.get_function(name)
    kernel_fixup(function, False)
    nvvm.set_launch_bounds(function, kernel.launch_bounds)
    maps = [i for i, p in enumerate(kernel.params) if p.abi == "map"]
    if maps:
        byvalue.annotate(function, maps)
    if library._linking_files:
        raise NotImplementedError("it links foreign code, which is not supported")
    for linked in set(library.linking_libraries):
        if not isinstance(linked._module, _Printed):
            linked._module = _Printed(str(linked._module))
    first, *rest = _renamed([str(m) for m in dict.fromkeys(library.modules)], name, kernel.entry)
    return [byvalue.pass_maps(first, kernel.entry, maps) if maps else first, *rest]


def ltoir(modules: list[str], arch: str) -> bytes:
    """LTO-IR of LLVM modules, for an architecture such as "sm_90a"."""
    modules = [byvalue.spell(m, arch) for m in modules]
    return bytes(nvvm.compile_ir(modules, **{"opt": 3, "arch": arch.replace("sm_", "compute_"), "gen-lto": None}))


_SYMBOL = re.compile(r'@"((?:[^"\\]|\\.)*)"|@([\w.$-]+)')
_DEFINED = re.compile(r'^(?:define\b[^@]*|)@(?:"([^"]+)"|([\w.$-]+))(?=\(| =)', re.MULTILINE)


def _renamed(modules: list[str], old_entry: str, entry: str) -> list[str]:
    """Modules in order of first reference from the kernel's, with numbered symbols and no comments."""
    texts = ["\n".join(line for line in m.splitlines() if not line.startswith(";")) for m in modules]
    home: dict[str, int] = {}
    for i, text in enumerate(texts):
        for match in _DEFINED.finditer(text):
            home.setdefault(match[1] or match[2], i)
    names = {old_entry: entry}
    order = [home[old_entry]]
    for at in order:
        for match in _SYMBOL.finditer(texts[at]):
            name = match[1] or match[2]
            if name not in home or name.startswith("llvm.") or name in names:
                continue
            names[name] = f"{entry}${len(names)}"
            if home[name] not in order:
                order.append(home[name])

    def rename(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return f'@"{names[name]}"' if name in names else match[0]

    return [_SYMBOL.sub(rename, texts[at]) for at in order]
