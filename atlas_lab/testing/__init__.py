"""Parity of arms as pytest tests, for this project's own and anyone's.

`parity_suite` makes a test class of an arm's checks. The package is also a pytest plugin, loaded only where it is asked
for (`pytest -p atlas_lab.testing`): options `--device`, `--plugin`, `--arm`, and the marker `gpu`.
"""

from __future__ import annotations

from atlas_lab.testing.options import (
    pytest_addoption as pytest_addoption,
)
from atlas_lab.testing.options import (
    pytest_collection_modifyitems as pytest_collection_modifyitems,
)
from atlas_lab.testing.options import (
    pytest_configure as pytest_configure,
)
from atlas_lab.testing.parity_suite import parity_suite

__all__ = ["parity_suite"]
