"""What the runtime raises: one sentence each."""

from __future__ import annotations


class DeviceError(RuntimeError):
    """The device is missing, or cannot do what was asked, or reported a failure."""


class GuardError(DeviceError):
    """Something wrote outside a buffer."""


class BindError(DeviceError):
    """A program that does not fit the buffers it was given."""


class VerifyError(DeviceError):
    """What was launched is not what was planned."""


class LoadError(RuntimeError):
    """A load plan that could not be executed; nothing of it stays allocated."""
