"""Tensor parallelism: slices of packed weights put together are the whole, bit for bit; ranks read their bytes alone;
what cannot be cut is refused with the reason."""

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atlas_lab.checkpoint import CheckpointError, Store, new, open_checkpoint, sizes, slice_source
from atlas_lab.checkpoint.files import Group, write_files
from atlas_lab.checkpoint.layout import Cut, Segment
from atlas_lab.checkpoint.naming import CONVENTIONS
from atlas_lab.checkpoint.sliced import Slice
from atlas_lab.checkpoint.slicing import cut_weight
from atlas_lab.checkpoint.writer import write_checkpoint
from atlas_lab.core.projection import Projection, WeightSource
from atlas_lab.core.tensor import Tensor
from atlas_lab.formats import FORMATS, get

IDS = [f"{c.producer}-{c.format}" for c in CONVENTIONS]
ROWS, COLUMNS = (1536, 256), (256, 1536)  # 1536 = 12 tiles of 128


@pytest.fixture(scope="module", params=CONVENTIONS, ids=IDS)
def stored(request, tmp_path_factory):
    """Two weights of one convention in a file, to be cut by rows and by columns."""
    c = request.param
    rng = np.random.default_rng(3)
    groups, held = [], {}
    for role, (n, k) in (("ffn.gate", ROWS), ("ffn.down", COLUMNS)):
        w = (0.02 * rng.standard_normal((n, k), np.float32)).astype(ml_dtypes.bfloat16)
        made = c.encode(role, n, k, w.__getitem__) if c.format != "bf16" else {f"{role}.weight": w}
        groups.append(Group(tuple(c.tensors(role, n, k).values()), lambda made=made: made))
        held[role] = Projection(0, role, n, k, c.source(role, n, k))
    folder = tmp_path_factory.mktemp("slices")
    write_files(folder, groups, {})
    return Store.open(folder), held


def values(store, p):
    arrays = {f: store.read(t.name) for f, t in p.weight.fields}
    for f, t in p.weight.fields:
        assert arrays[f].shape == t.shape
    return get(p.weight.format).dequantize(arrays)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("role", "axis"), [("ffn.gate", 0), ("ffn.down", 1)])
def test_slices_are_the_whole(stored, reads, role, axis, size):
    store, held = stored
    p = held[role]
    whole = values(store, p)
    slices = [slice_source(p, rank, size) for rank in range(size)]
    assert [(s.n, s.k) for s in slices] == [(p.n // (1, size)[axis == 0], p.k // (1, size)[axis == 1])] * size
    reads.clear()
    assert np.concatenate([values(store, s) for s in slices], axis).tobytes() == whole.tobytes()
    cut = [t for s in slices for t in s.weight.tensors.values() if Slice.parse(t.name)]
    assert sum(asked for _, _, asked in reads) == sum(t.bytes for t in cut)
    assert len({at for at, _, _ in reads}) == len(reads)  # no byte twice
    if size > 1:
        shared = [t for _, t in p.weight.fields if t in slices[0].weight.tensors.values()]
        assert sum(t.bytes for t in cut) == sum(t.bytes for _, t in p.weight.fields if t not in shared)
        # what every rank has is a scale of the whole tensor, or of whole rows that are cut across
        assert all(t.elements == 1 or (axis == 1 and p.weight.geometry.kind == "row") for t in shared)


def test_one_rank_has_the_weight_itself(stored):
    _, held = stored
    assert slice_source(held["ffn.gate"], 0, 1) is held["ffn.gate"]


def test_segments_are_shared_out_each_by_itself(stored):
    store, held = stored
    p = held["ffn.gate"]
    cut = Cut.rows(Segment(512, 128), Segment(256, 128), Segment(768, 128))
    whole = values(store, p)
    first, second = (values(store, slice_source(p, rank, 2, cut)) for rank in (0, 1))
    for mine, spans in ((first, [(0, 256), (512, 640), (768, 1152)]), (second, [(256, 512), (640, 768), (1152, 1536)])):
        assert mine.tobytes() == np.concatenate([whole[b:e] for b, e in spans]).tobytes()


def taken(arrays, weight):
    """The parts that handles name, of arrays by the base's name."""
    out = {}
    for f, t in weight.fields:
        part = Slice.parse(t.name) or Slice(t.name, ())
        a = arrays[part.base]
        for i, spans in enumerate(part.axes):
            if spans is not None:
                a = np.concatenate([a.take(range(b, e), i) for b, e in spans], i)
        assert a.shape == t.shape
        out[f] = a
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_any_boundary_of_any_format(name):
    """Rows and columns between any two boundaries are what dequantizing all and cutting gives."""
    form = get(name)
    g = form.geometry
    step = {"block": (g.rows, g.cols), "group": (1, g.cols), "packed": (1, g.cols)}.get(g.kind, (1, 1))

    @given(st.data())
    def check(data):
        n = data.draw(st.integers(1, 3)) * step[0] + data.draw(st.integers(0, 2)) * (step[0] > 1)
        k = data.draw(st.integers(1, 4)) * step[1]
        rng = np.random.default_rng(n * k)
        arrays = form.quantize(rng.standard_normal((n, k), np.float32))
        names = {f: next(d for d, v in DTYPE_NAMES.items() if v == a.dtype) for f, a in arrays.items()}
        fields = tuple((f, Tensor(names[f], a.shape, f)) for f, a in arrays.items())
        weight = WeightSource(form.name, form.family, g, fields)
        whole = form.dequantize(arrays)
        axis = data.draw(st.sampled_from((0, 1)))
        extent = (n, k)[axis]
        places = sorted({*range(0, extent + 1, step[axis]), extent})
        points = sorted(data.draw(st.sets(st.sampled_from(places), min_size=2, max_size=4)))
        points = points[: len(points) // 2 * 2]
        spans = tuple(zip(points[::2], points[1::2], strict=True))
        # a tile cut short by the weight's edge ends a part, and no other span may follow it: always so here
        part = cut_weight(weight, n, k, axis, spans, "w")
        wanted = np.concatenate([whole.take(range(b, e), axis) for b, e in spans], axis)
        assert form.dequantize(taken(arrays, part)).tobytes() == wanted.tobytes()

    check()


DTYPE_NAMES = {
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "f32": np.float32,
    "u8": np.uint8,
    "i8": np.int8,
    "f16": np.float16,
}


@given(st.integers(1, 4000), st.integers(1, 200), st.integers(2, 4), st.sampled_from(["fp8", "nvfp4", "bf16"]))
def test_a_cut_is_equal_and_on_boundaries_or_refused(rows, columns, size, name):
    form = get(name)
    k = columns * 16
    assume(rows * k < 1 << 40)
    tensors = form.tensors(rows, k)
    weight = WeightSource(form.name, form.family, form.geometry, tuple((f, Tensor(*s, f)) for f, s in tensors.items()))
    for role, extent, step in (
        ("ffn.up", rows, 128 if name == "fp8" else 1),
        ("ffn.down", k, {"fp8": 128, "nvfp4": 16}.get(name, 1)),
    ):
        p = Projection(0, role, rows, k, weight)
        possible = extent % size == 0 and extent // size % step == 0
        for rank in range(size):
            if not possible:
                with pytest.raises(CheckpointError, match=rf"a multiple of ({size} to share|{step}, a boundary)"):
                    slice_source(p, rank, size)
                continue
            made = slice_source(p, rank, size)
            found = {f: Tensor(t.dtype, t.shape) for f, t in made.weight.fields}
            assert found == {f: Tensor(*s) for f, s in form.tensors(made.n, made.k).items()}


def test_a_grid_of_rank_four():
    fields = (("weight", Tensor("e4m3", (512, 384), "w")), ("scale", Tensor("bf16", (4, 1, 3, 1), "s")))
    weight = WeightSource("fp8", "fp8", get("fp8").geometry, fields)
    assert [str(t) for t in cut_weight(weight, 512, 384, 0, ((128, 384),), "w").tensors.values()] == [
        "w[128:384]: e4m3[256, 384]",
        "s[1:3]: bf16[2, 1, 3, 1]",
    ]
    assert [str(t) for t in cut_weight(weight, 512, 384, 1, ((0, 128), (256, 384)), "w").tensors.values()] == [
        "w[:,0:128+256:384]: e4m3[512, 256]",
        "s[:,:,0:1+2:3]: bf16[4, 1, 2, 1]",
    ]


def projection(form, role, n, k):
    c = next(c for c in CONVENTIONS if c.format == form)
    return Projection(7, role, n, k, c.source("m", n, k))


KV = Cut.rows(Segment(512, 256, "KV heads"))
TILES, GROUPS = "a boundary of the tiles of its scales", "a boundary of the groups under one scale"
REFUSED = [
    (("nvfp4", "ffn.gate", 17408, 5120), 3, None, ": m.weight: found 17408 rows, expected a multiple of 3 to share "
     "among 3 ranks"),
    (("nvfp4", "ffn.down", 5120, 17408), 3, None, ": m.weight: found 17408 columns, expected a multiple of 3 to share "
     "among 3 ranks"),
    (("bf16", "attn.k", 512, 5120), 4, KV, ": m.weight: found 2 KV heads, expected a multiple of 4 to share among 4 "
     "ranks"),
    (("fp8", "ffn.up", 384, 256), 2, None, ": m.weight: found a cut at row 192, expected one at a multiple of 128, "
     + TILES),
    (("fp8", "attn.o", 256, 384), 2, None, ": m.weight: found a cut at column 192, expected one at a multiple of 128, "
     + TILES),
    (("nvfp4_ct", "gdn.out", 256, 272), 2, None, ": m.weight_packed: found a cut at column 136, expected one at a "
     "multiple of 16, " + GROUPS),
    (("bf16", "gdn.qkv", 512, 256), 2, None, ": found no widths of q, k and v, expected them to cut by heads"),
]  # fmt: skip


@pytest.mark.parametrize(("of", "size", "cut", "sentence"), REFUSED)
def test_what_cannot_be_cut(of, size, cut, sentence):
    for rank in range(size):
        with pytest.raises(CheckpointError, match="^" + re.escape(f"layers.7.{of[1]}{sentence}") + "$"):
            slice_source(projection(*of), rank, size, cut)


def test_blocks_are_not_cut():
    g = get("q4_k").geometry
    weight = WeightSource("q4_k", "q4_k", g, (("blocks", Tensor("u8", (4, 3 * 144), "b")),))
    with pytest.raises(
        CheckpointError, match=r"^x: b: found a cut at column 384, .* 256, a boundary of the stored block"
    ):
        cut_weight(weight, 4, 768, 1, ((0, 384),), "x")


def test_ranks_that_are_none():
    with pytest.raises(CheckpointError, match=r"^tensor parallel: found rank 2 of 2, expected 0 <= rank < size$"):
        slice_source(projection("bf16", "ffn.up", 4, 4), 2, 2)


# Heads and widths that every format can cut in four.
HEADS = {"heads": 4, "kv_heads": 4, "key_heads": 4, "value_heads": 8}
WIDTHS = {"hidden": 128, "intermediate": 512, "head_dim": 128, "key_head_dim": 128, "value_head_dim": 128}
WIDE = sizes("tiny", **HEADS, **WIDTHS)


def rows_of(s, role, rank, size):
    """Rows of a whole weight that a rank has, written down without the code under test."""

    def share(first, heads, width):
        mine = heads // size
        return list(range(first + rank * mine * width, first + (rank + 1) * mine * width))

    keys, key, value = s.key_heads * s.key_head_dim, s.key_head_dim, s.value_head_dim
    return {
        "attn.q": share(0, s.heads, 2 * s.head_dim),  # a head's query rows, then its gate rows
        "attn.k": share(0, s.kv_heads, s.head_dim),
        "attn.v": share(0, s.kv_heads, s.head_dim),
        "gdn.qkv": share(0, s.key_heads, key) + share(keys, s.key_heads, key) + share(2 * keys, s.value_heads, value),
        "gdn.z": share(0, s.value_heads, value),
        "gdn.b": share(0, s.value_heads, 1),
        "gdn.a": share(0, s.value_heads, 1),
        "ffn.gate": share(0, s.intermediate, 1),
        "ffn.up": share(0, s.intermediate, 1),
        "lm_head": share(0, s.vocab, 1),
    }.get(role)  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4+fp8"])
def test_a_whole_model_by_rank(tmp_path, form, size):
    write_checkpoint(tmp_path / "c", WIDE, form, producer="modelopt" if "+" in form else "")
    whole = open_checkpoint(tmp_path / "c")
    ranks = [open_checkpoint(tmp_path / "c", tensor_parallel=(rank, size)) for rank in range(size)]
    for rank, held in enumerate(ranks):
        assert held.tensor_parallel == (rank, size)
        assert (held.dims.kv_heads, held.dims.intermediate) == (4 // size, 512 // size)
        assert held.dims.kv_bytes_per_token(2) == whole.dims.kv_bytes_per_token(2) // size
        assert held.unread == whole.unread
        for p, mine in zip(whole.projections, held.projections, strict=True):
            all_of_it = values(whole.store, p)
            rows = rows_of(WIDE, p.role, rank, size)
            if rows is None:
                width = p.k // size
                wanted = all_of_it[:, rank * width : (rank + 1) * width]
            else:
                wanted = all_of_it[rows]
            assert (mine.n, mine.k) == wanted.shape
            assert values(held.store, mine).tobytes() == wanted.tobytes(), p.label
        _check_parameters(whole, held, rank, size)


def _check_parameters(whole, held, rank, size):
    for p, mine in zip(whole.parameters, held.parameters, strict=True):
        role = {"gdn.conv": "gdn.qkv", "gdn.A_log": "gdn.a", "gdn.dt_bias": "gdn.a"}.get(p.role)
        wanted = whole.store.read(p.tensor.name)
        wanted = wanted[rows_of(WIDE, role, rank, size)] if role else wanted
        assert held.store.read(mine.tensor.name).tobytes() == wanted.tobytes(), p.label
        assert (mine == p) == (role is None)


def test_a_rank_reads_a_fraction_of_the_file(tmp_path, reads):
    write_checkpoint(tmp_path / "c", WIDE, "nvfp4")
    whole = open_checkpoint(tmp_path / "c")
    held = open_checkpoint(tmp_path / "c", tensor_parallel=(1, 4))
    for p in held.projections:
        for t in p.weight.tensors.values():
            held.store.read(t.name)
    stored = sum(t.bytes for p in whole.projections for t in p.weight.tensors.values() if t.elements > 1)
    assert sum(asked for _, _, asked in reads) == stored // 4


def test_a_model_that_cannot_be_shared(tmp_path):
    new(tmp_path / "c", "fp8", layers=1)
    sentence = (
        f"{tmp_path / 'c'}: layers.0.gdn.qkv: model.language_model.layers.0.linear_attn.in_proj_qkv.weight: found a "
    )
    with pytest.raises(
        CheckpointError, match="^" + re.escape(sentence + "cut at row 64, expected one at a multiple of 128")
    ):
        open_checkpoint(tmp_path / "c", tensor_parallel=(0, 2))
    with pytest.raises(CheckpointError, match=r"c: tensor parallel: found rank 4 of 4, expected 0 <= rank < size$"):
        open_checkpoint(tmp_path / "c", tensor_parallel=(4, 4))
