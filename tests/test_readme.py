"""The README's example is the one that the tests run, and the commands it names exist."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from atlas_lab.cli import verbs  # noqa: F401  (registers them)
from atlas_lab.cli.common import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


@pytest.mark.parametrize(("block", "file"), [(0, "int8_row.py"), (1, "test_int8_row.py")])
def test_the_example_is_the_file_that_runs(block, file):
    assert BLOCKS[block] == (ROOT / "tests/plugins" / file).read_text(encoding="utf-8")


def test_every_verb_it_names_exists_and_every_verb_is_named():
    named = set(re.findall(r"atlas-lab (\w+)", README))
    assert named == set(get_command(app).commands)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", README))
def test_its_links_lead_somewhere(link):
    assert (ROOT / link).exists()
