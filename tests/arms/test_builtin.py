"""Every built-in arm, found as anyone's: a new one is covered by existing. Kernels are compiled for the first target's
architecture, and one of each family for the others: all of them with `--full`."""

from pathlib import Path

from atlas_lab.testing.parity_suite import Wanted, suite_of

TestBuiltIn = suite_of(
    lambda config: Wanted(
        patterns=(), plugins=(), base=Path(__file__).parent, everywhere=config.getoption("--full", False)
    )
)
