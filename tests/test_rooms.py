"""Each room imports only rooms above it, read from the source: imports in functions and under TYPE_CHECKING too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import atlas_lab

ROOT = Path(atlas_lab.__file__).parent
ROOMS = (
    "formats", "kernels.lang", "kernels", "core", "checkpoint", "simt", "runtime", "arms", "blocks", "models",
    "experiments", "testing", "cli",
)  # fmt: skip
COMPILERS = ("numba", "numba_cuda", "llvmlite")
PEERS = ("torch", "triton", "transformers", "compressed_tensors", "humming", "nvmath")
# Imports inside functions that are what the file is for.
EXEMPT = {
    ("cli/doctor.py", "numba"): "says whether it can be imported",
    ("experiments/peer_graph.py", "torch"): "is compared with, where it is installed",
    ("experiments/peer_humming.py", "humming"): "is compared with, where it is installed",
    ("runtime/cublaslt.py", "nvmath"): "is called, where it is installed",
}
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")
HOMES = {name: module for module, names in atlas_lab._HOMES.items() for name in names}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room of a module named from `atlas_lab`'s inside; "" for the package itself."""
    if module.startswith("kernels.lang"):
        return "kernels.lang"
    return "cli" if module == "__main__" else module.partition(".")[0]


def imports(path: Path, tree: ast.AST | None = None) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything the file imports; names of `atlas_lab` itself as where they live."""
    package = ["atlas_lab", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree or ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(p for p in (base, node.module or "") if p)
            for a in node.names:
                if module == "atlas_lab" and a.name in HOMES:
                    yield node.lineno, f"atlas_lab.{HOMES[a.name]}"
                elif module in ("atlas_lab", "atlas_lab.kernels"):
                    yield node.lineno, f"{module}.{a.name}"
                else:
                    yield node.lineno, module
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def exempt(path: Path) -> set[tuple[int, str]]:
    """Imports of the file that are allowed by name, if they are in a function."""
    allowed = [name for file, name in EXEMPT if file == path.relative_to(ROOT).as_posix()]
    functions = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    return {(line, name) for f in functions for line, name in imports(path, f) if name.partition(".")[0] in allowed}


def problems(path: Path) -> Iterator[str]:
    here = room_of(module_of(path))
    passed = exempt(path)
    above = {"kernels": ("kernels.lang", "kernels")}.get(here, ROOMS[: ROOMS.index(here) + 1])
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        if (line, name) in passed:
            continue
        where = f"{path.relative_to(ROOT.parent)}:{line}: {here} imports {name}"
        if top == "atlas_lab" and room_of(rest) not in above:
            yield f"{where}, expected only {', '.join(above)}"
        elif top in COMPILERS and here != "kernels.lang":
            yield f"{where}, which only kernels.lang may"
        elif top in PEERS:
            yield f"{where}, which nothing may"


def test_every_file_is_in_a_room() -> None:
    strange = [str(p) for p in FILES if room_of(module_of(p)) not in ROOMS]
    assert not strange, f"expected rooms {', '.join(ROOMS)}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_above_it(room: str) -> None:
    found = [said for p in FILES if room_of(module_of(p)) == room for said in problems(p)]
    assert not found, "\n".join(found)


def test_every_exemption_is_needed() -> None:
    for file, name in EXEMPT:
        assert name in {n.partition(".")[0] for _, n in exempt(ROOT / file)}, file


def test_what_the_test_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
from __future__ import annotations
from atlas_lab.kernels import lang as L
from atlas_lab.kernels import gemv
from atlas_lab import Rounded
from ..core import route
from . import sibling
from .. import arms
import numba.cuda
def late():
    import torch
    import_module("atlas_lab.cli")
if TYPE_CHECKING:
    from atlas_lab.simt.run import launch
"""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for room, bad in (("kernels", [5, 6, 8, 9, 11, 12, 14]), ("simt", [8, 9, 11, 12]), ("testing", [9, 11, 12])):
        (tmp_path / room).mkdir()
        path = tmp_path / room / "made.py"
        path.write_text(source)
        assert sorted(int(said.split(":")[1]) for said in problems(path)) == bad, room


def test_the_authoring_names_and_their_types_agree() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    guarded = next(n for n in tree.body if isinstance(n, ast.If))
    typed = {}
    for node in guarded.body:
        assert isinstance(node, ast.ImportFrom)
        assert all(a.asname == a.name for a in node.names), f"line {node.lineno}: expected `import X as X`"
        typed |= {a.name: (node.module or "").removeprefix("atlas_lab.") for a in node.names}
    assert typed == HOMES
    assert atlas_lab.__all__ == sorted(HOMES) == sorted(set(atlas_lab.__all__))
    for name in HOMES:
        assert getattr(atlas_lab, name) is not None
    with pytest.raises(AttributeError, match="module 'atlas_lab' has no attribute 'Amr'"):
        _ = atlas_lab.Amr


def test_authoring_loads_no_compiler_and_no_cuda() -> None:
    code = (
        "import sys, atlas_lab, atlas_lab.kernels.lang\n"
        "[getattr(atlas_lab, n) for n in atlas_lab.__all__]\n"
        "atlas_lab.load_registry(installed=[])\n"
        f"print([m for m in {(*COMPILERS, *PEERS, 'cuda')!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
