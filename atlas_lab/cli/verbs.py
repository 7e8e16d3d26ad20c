"""Every verb, in the order in which `--help` lists them."""

from atlas_lab.cli import ab as ab  # isort: skip
from atlas_lab.cli import arms as arms  # isort: skip
from atlas_lab.cli import plan as plan  # isort: skip
from atlas_lab.cli import parity as parity  # isort: skip
from atlas_lab.cli import inspect as inspect  # isort: skip
from atlas_lab.cli import bench as bench  # isort: skip
from atlas_lab.cli import tune as tune  # isort: skip
from atlas_lab.cli import checkpoint as checkpoint  # isort: skip
from atlas_lab.cli import doctor as doctor  # isort: skip
