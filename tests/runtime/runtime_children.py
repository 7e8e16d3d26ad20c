"""What tests call in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from runtime_kernels import launch, ports, spin, store_at

from atlas_lab.core.launch import Program
from atlas_lab.core.tensor import Tensor
from atlas_lab.runtime.device import open_device


def add(a: int, b: int = 0) -> dict[str, Any]:
    print("added", a, b)
    return {"sum": a + b, "pid": os.getpid()}


def refuse(text: str) -> None:
    raise ValueError(text)


def leave(status: int) -> None:
    print("about to go", file=sys.stderr, flush=True)
    os._exit(status)


def die() -> None:
    os.kill(os.getpid(), 11)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def sleep_in_a_grandchild(seconds: float, pid_file: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    Path(pid_file).write_text(str(child.pid))
    child.wait()


def unspeakable() -> object:
    return object()


def store_far_away() -> str:
    """A write 4 TB behind its buffer, and whatever the device says of it."""
    y = Tensor("u32", (4,), "y")
    program = Program("stray", (launch(store_at, 1, y, 1 << 40, 7),), inputs=(), outputs=(y,))
    with open_device("cuda") as device:
        device.bind(program, ports(device, program)).run()
        device.synchronize()
    return "not noticed"


def spin_for_ever() -> str:
    """A kernel that never ends."""
    flag = Tensor("u32", (1,), "flag")
    program = Program("spin", (launch(spin, 1, flag, block=1),), inputs=(flag,), outputs=())
    with open_device("cuda") as device:
        buffers = ports(device, program)
        device.upload(buffers["flag"], np.zeros(1, np.uint32))
        device.bind(program, buffers).run()
        device.synchronize()
    return "ended"
