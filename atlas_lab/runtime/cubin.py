"""A compiled kernel on the device: its handles, what it may use, and how much dynamic shared memory it may have."""

from __future__ import annotations

from atlas_lab.kernels.lang import Kernel
from atlas_lab.kernels.lang.compile import Compiled
from atlas_lab.runtime.bind import Resolved
from atlas_lab.runtime.card import Card
from atlas_lab.runtime.driver import bindings, call, core, text
from atlas_lab.runtime.errors import BindError


class DeviceKernel:
    """A kernel loaded from its cubin into the current context.

    `symbol` is its name as the driver has it, `entry` what records call it, `static` its static shared bytes,
    `threads` the most its registers allow in a block; `allowed` and `limit` the dynamic shared bytes a block may have
    now and after opting in.
    """

    def __init__(self, kernel: Kernel, compiled: Compiled, card: Card) -> None:
        what = f"kernel {kernel.entry}: loading its cubin"
        driver = bindings()
        self._object = core().ObjectCode.from_cubin(compiled.cubin)
        self.core = self._object.get_kernel(compiled.entry)
        self.handle = driver.CUkernel(int(self.core.handle))
        # Launches take the kernel's handle for a function's; the function itself is asked for so that the module is
        # loaded now and no launch or capture has to.
        self.function = driver.CUfunction(int(self.handle))
        self.loaded = call(what, "cuKernelGetFunction", self.handle)
        self.symbol = text(call(what, "cuKernelGetName", self.handle))
        # A record speaks of kernels by their spec; another name in the driver stays visible in it.
        self.entry = kernel.entry if self.symbol == compiled.entry else self.symbol
        self._device = driver.CUdevice(card.ordinal)
        self._attributes = driver.CUfunction_attribute
        self.threads = self._attribute("CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK", what)
        # As the assembler counts it: a few static bytes below dynamic memory of a large alignment take up as many.
        self.static = compiled.shared
        self.allowed = max(card.shared_default - self.static, 0)
        self.limit = card.shared_optin - self.static

    def _attribute(self, name: str, what: str) -> int:
        return int(call(what, "cuKernelGetAttribute", getattr(self._attributes, name), self.handle, self._device))

    def admit(self, x: Resolved, where: str) -> None:
        """Raise BindError for a launch the card cannot make; opt in to more shared memory where it needs that.

        The default limit is 48 KB less the static part: with one static byte even 48 KB need opting in.
        """
        threads, dynamic = x.launch.threads, x.launch.shared
        if threads > self.threads:
            raise BindError(f"{where}: found {threads} threads a block, its registers allow {self.threads}")
        if dynamic > self.limit:
            raise BindError(
                f"{where}: found {dynamic} bytes of dynamic shared memory, the card allows {self.limit} beside "
                f"{self.static} static ones"
            )
        if dynamic > self.allowed:
            what = f"{where}: allowing {dynamic} bytes of dynamic shared memory"
            attribute = self._attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(what, "cuKernelSetAttribute", attribute, dynamic, self.handle, self._device)
            self.allowed = dynamic
