"""Every verb, in the order in which `--help` lists them."""

from atlas_lab.cli import ab as ab
from atlas_lab.cli import arms as arms
from atlas_lab.cli import checkpoint as checkpoint
from atlas_lab.cli import plan as plan
