"""The suite for arms named on the command line:

pytest -p atlas_lab.testing --pyargs atlas_lab.testing.suite --plugin ./int8_row.py --arm int8_row_gemv
"""

from __future__ import annotations

import pytest

from atlas_lab.testing.parity_suite import Wanted, suite_of


def _from_options(config: pytest.Config) -> Wanted:
    patterns, plugins = config.getoption("atlas_arms", []), config.getoption("atlas_plugins", [])
    return Wanted(tuple(patterns), tuple(plugins), config.invocation_params.dir)


TestArms = suite_of(_from_options)
