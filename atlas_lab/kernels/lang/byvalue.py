"""Tensor maps as kernel parameters: 128 bytes by value, 64-byte aligned, read where the launch put them.

Numba lowers such a parameter as an address. Here the kernel's text is given the parameter itself and takes its address;
the annotation `grid_constant` (CUDA's `__grid_constant__`) keeps the compiler from copying it to local memory first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llvmlite import ir

_I32 = ir.IntType(32)
_OLD = "[128 x i8]* byval align 64"
_NEW = "[128 x i8]* byval([128 x i8]) align 64"


def annotate(function: ir.Function, maps: Sequence[int]) -> None:
    """Mark the parameters at these positions `grid_constant`."""
    module = function.module
    positions = module.add_metadata([ir.Constant(_I32, i + 1) for i in maps])
    mark = module.add_metadata([function, ir.MetaDataString(module, "grid_constant"), positions])
    module.get_named_metadata("nvvm.annotations").add(mark)


def pass_maps(text: str, entry: str, maps: Sequence[int]) -> str:
    """The module of a kernel with these parameters passed by value; they are `i64` in `text`."""
    found = re.search(rf'^define void @"{re.escape(entry)}"\(([^)]*)\)([^{{]*{{\s*entry:\n)', text, re.MULTILINE)
    if found is None:
        raise ValueError(f"found no definition of {entry} with an entry block")
    parameters = found[1].split(", ")
    kinds = [p.split(" ")[0] for p in parameters]
    before = f"void ({', '.join(kinds)})*"
    addresses = ""
    for i in maps:
        name = parameters[i].split("%", 1)[1].strip('"')
        parameters[i], kinds[i] = f'{_OLD} %"{name}.map"', "[128 x i8]*"
        addresses += f'  %"{name}" = ptrtoint [128 x i8]* %"{name}.map" to i64\n'
    define = f'define void @"{entry}"({", ".join(parameters)}){found[2]}{addresses}'
    text = text[: found.start()] + define + text[found.end() :]
    return text.replace(f'{before} @"{entry}"', f'void ({", ".join(kinds)})* @"{entry}"')


def spell(text: str, arch: str) -> str:
    """The attribute as the architecture's compiler reads it: from compute capability 10 on it names its type."""
    return text.replace(_OLD, _NEW) if int(re.sub(r"\D", "", arch)) >= 100 else text
