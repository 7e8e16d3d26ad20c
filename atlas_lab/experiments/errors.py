"""What stops an experiment before it ran: bad input, in one sentence."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting, a file or an experiment that cannot be used; one sentence that names where it stands."""
