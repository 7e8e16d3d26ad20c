"""Every built-in arm, found as anyone's: a new one is covered by existing."""

from pathlib import Path

from atlas_lab.testing.parity_suite import Wanted, suite_of

TestBuiltIn = suite_of(lambda config: Wanted(patterns=(), plugins=(), base=Path(__file__).parent))
