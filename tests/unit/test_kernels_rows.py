"""Row kernels against their twins: scan, gather, scatter, scale-cast, coalesce."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib import ops
from tests import reference
from tests.reference import same_bits

dtypes = st.sampled_from(ops.ROW_DTYPES)
dims = st.sampled_from([0, 1, 2, 3, 4, 7, 8, 9, 65, 130, 520, 1030])
seeds = st.integers(0, 2**20)
SPECIAL = [0.0, -0.0, 1e-40, -1e-7, float("nan"), float("inf"), float("-inf"), 65504.0, 1.5]


def make_rows(num_rows: int, dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal values, rows of zeros, and here and there a value that is easily got wrong."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, dim, generator=g, dtype=torch.float64)
    x *= torch.randint(0, 2, (num_rows, 1), generator=g)
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    picks = special[torch.randint(0, len(SPECIAL), x.shape, generator=g)]
    rare = torch.rand(x.shape, generator=g) < 1.5 / max(dim, 1)
    return torch.where(rare, picks, x).to(dtype)


def make_ids(count: int, num_rows: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed + 1)
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64)
    return torch.randint(0, num_rows, (count,), generator=g)


@given(st.integers(0, 70), dims, dtypes, seeds)
def test_scan_is_its_twin(num_rows: int, dim: int, dtype: torch.dtype, seed: int) -> None:
    x = make_rows(num_rows, dim, dtype, seed)
    assert torch.equal(ops.scan_rows(x), reference.scan_rows(x))
    wide = torch.cat([x, x], dim=1)[:, :dim]  # not contiguous
    assert torch.equal(ops.scan_rows(wide), reference.scan_rows(x))


@pytest.mark.parametrize("dtype", ops.ROW_DTYPES)
@pytest.mark.parametrize("dim", [2, 3, 8, 100])
def test_scan_counts_bits_not_sums(dtype: torch.dtype, dim: int) -> None:  # C02
    x = torch.zeros(5, dim, dtype=dtype)
    x[0, 0], x[0, 1] = 1.0, -1.0
    x[1, dim - 1] = 1e-40 if dtype in (torch.float32, torch.float64) else 6e-8
    if dtype == torch.bfloat16:
        x[1, dim - 1] = 1e-40
    x[2, dim - 1] = float("nan")
    x[3, :] = -0.0
    assert ops.bitmap_to_indices(ops.scan_rows(x), 5).tolist() == [0, 1, 2]


@given(st.integers(0, 20), st.integers(0, 30), dims, dtypes, st.none() | dtypes, seeds)
def test_gather_is_its_twin(
    num_rows: int, count: int, dim: int, dtype: torch.dtype, to: torch.dtype | None, seed: int
) -> None:
    src, ids = make_rows(num_rows, dim, dtype, seed), make_ids(count, num_rows, seed)
    want = reference.gather_rows(src, ids, to)
    assert same_bits(ops.gather_rows(src, ids, dtype=to), want)
    out = torch.full_like(want, 7)
    assert ops.gather_rows(src, ids, out=out) is out
    assert same_bits(out, want)


@given(st.integers(0, 20), dims, dtypes, seeds)
def test_scatter_is_its_twin(num_rows: int, dim: int, dtype: torch.dtype, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randperm(num_rows, generator=g)[: num_rows // 2]
    src = make_rows(len(ids), dim, dtype, seed)
    dst = make_rows(num_rows, dim, dtype, seed + 1)
    want = dst.clone()
    reference.scatter_rows_(want, ids, src)
    assert ops.scatter_rows_(dst, ids, src) is dst
    assert same_bits(dst, want)


@given(
    st.integers(0, 12),
    st.integers(0, 30),
    dims,
    dtypes,
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 0.25, -3.1]),
    seeds,
)
def test_scatter_add_is_its_twin(
    num_rows: int,
    count: int,
    dim: int,
    dtype: torch.dtype,
    into_float: bool,
    unique: bool,
    scale: float,
    seed: int,
) -> None:
    ids = make_ids(count, num_rows, seed)
    if unique:
        ids = ids.unique()
    src = make_rows(len(ids), dim, dtype, seed)
    dst_dtype = torch.float32 if into_float and src.element_size() == 2 else dtype
    dst = make_rows(num_rows, dim, dst_dtype, seed + 1)
    want = dst.clone()
    reference.scatter_add_rows_(want, ids, src, scale)
    assert ops.scatter_add_rows_(dst, ids, src, scale) is dst
    assert same_bits(dst, want)


@given(st.integers(0, 20), dims, dtypes, dtypes, st.sampled_from([1.0, 1 / 3, -2e5]), seeds)
def test_scale_cast_is_its_twin(
    num_rows: int, dim: int, dtype: torch.dtype, to: torch.dtype, scale: float, seed: int
) -> None:
    src = make_rows(num_rows, dim, dtype, seed)
    want = reference.scale_cast_rows(src, scale, to)
    assert same_bits(ops.scale_cast_rows(src, scale, to), want)


@given(st.integers(0, 40), st.integers(1, 3000), dims, dtypes, seeds)
def test_coalesce_is_its_twin(
    count: int, num_rows: int, dim: int, dtype: torch.dtype, seed: int
) -> None:
    ids, values = make_ids(count, num_rows, seed) // 2, make_rows(count, dim, dtype, seed)
    got, want = ops.coalesce_rows(ids, values, num_rows), reference.coalesce_rows(ids, values, 0)
    assert torch.equal(got[0], want[0])
    assert same_bits(got[1], want[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_converts_and_rounds_as_torch_does(dtype: torch.dtype) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = ops.scale_cast_rows(halves[None], 1.0, torch.float32)
    assert same_bits(wide, halves.float()[None])
    # Between any two neighbours: the midpoint and its neighbours, which decide the rounding.
    finite = halves[halves.isfinite()].float().sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    up, down = (torch.nextafter(middle, middle.new_tensor(s)) for s in (1e38, -1e38))
    x = torch.cat([finite, middle, up, down, torch.tensor([65519.9, 65520.0, 3.4e38])])
    for shift in range(9):  # the vector and the scalar path both see each value
        part = x[shift:][None].contiguous()
        assert same_bits(ops.scale_cast_rows(part, 1.0, dtype), part.to(dtype))
    single = x[:, None][::37].contiguous()
    ids = torch.arange(len(single))
    assert same_bits(ops.gather_rows(single, ids, dtype=dtype), single.to(dtype))


def test_fp16_sums_pass_through_values_it_cannot_hold() -> None:  # C07
    ids = torch.tensor([3, 3, 3])
    values = torch.tensor([[40000.0], [40000.0], [-40000.0]], dtype=torch.float16)
    assert ops.coalesce_rows(ids, values, 4)[1].item() == 40000.0
    total = ops.scatter_add_rows_(torch.zeros(4, 1), ids[:2], values[:2])
    assert ops.scale_cast_rows(total, 0.5, torch.float16)[3].item() == 40000.0


def test_flat_index_past_two_to_the_31_elements() -> None:
    num_rows, dim = 65536 + 1, 32768  # 4 GiB of bf16 that is never touched, save two rows
    table = torch.empty(num_rows, dim, dtype=torch.bfloat16)
    row = torch.arange(dim).remainder(97).to(torch.bfloat16)[None]
    last = torch.tensor([65536])
    ops.scatter_rows_(table, last, row)
    assert table.view(-1)[65536 * 32768 + 5] == 5
    ops.scatter_add_rows_(table, last, row)
    assert torch.equal(ops.gather_rows(table, last), 2 * row)
