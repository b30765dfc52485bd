"""Bitmaps, unique ids, the id codec and balanced owners against their twins."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib import ops
from tests import reference

id_lists = st.lists(st.integers(0, 199), max_size=60)


def long(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@given(id_lists, st.integers(200, 300), st.booleans())
def test_bitmap_is_its_twin(ids: list[int], num_rows: int, tidy: bool) -> None:
    indices = long(sorted(set(ids)) if tidy else ids)
    bitmap = ops.indices_to_bitmap(indices, num_rows)
    assert torch.equal(bitmap, reference.indices_to_bitmap(indices, num_rows))
    assert ops.bitmap_count(bitmap) == reference.bitmap_count(bitmap) == len(set(ids))
    listed = ops.bitmap_to_indices(bitmap, num_rows)
    assert torch.equal(listed, reference.bitmap_to_indices(bitmap, num_rows))
    assert listed.tolist() == sorted(set(ids))


@given(st.integers(0, 5), st.integers(0, 40), st.integers(0, 1000))
def test_bitmap_or_is_its_twin(k: int, num_bytes: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    bitmaps = torch.randint(0, 256, (k, num_bytes), generator=g, dtype=torch.uint8)
    assert torch.equal(ops.bitmap_or(bitmaps), reference.bitmap_or(bitmaps))


def test_or_is_not_a_sum() -> None:  # C01
    assert ops.bitmap_or(torch.tensor([[6], [2]], dtype=torch.uint8)).tolist() == [6]
    assert ops.bitmap_or(torch.ones(256, 1, dtype=torch.uint8)).tolist() == [1]


@pytest.mark.parametrize("flags", range(0, 2**13, 61))
def test_13_flags_round_trip(flags: int) -> None:  # C01
    rows = [i for i in range(13) if flags >> i & 1]
    bitmap = ops.indices_to_bitmap(long(rows), 13)
    assert bitmap.tolist() == [flags & 255, flags >> 8]
    assert ops.bitmap_to_indices(bitmap, 13).tolist() == rows


def test_bitmap_of_more_than_two_to_the_31_rows() -> None:
    num_rows = 2**31 + 9
    ids = long([0, 2**31 - 1, 2**31, 2**31 + 8])
    bitmap = ops.indices_to_bitmap(ids, num_rows)
    assert bitmap.numel() == 268435458
    assert torch.equal(ops.bitmap_to_indices(bitmap, num_rows), ids)


@given(
    st.lists(st.integers(-1, 250), max_size=60),
    st.sampled_from([251, 10**6, 2**40]),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
)
def test_unique_is_its_twin(
    ids: list[int], num_rows: int, dtype: torch.dtype, negative_padding: bool
) -> None:
    if negative_padding:  # -1 drops nothing, so it is not a legal id
        ids, drop = [i for i in ids if i >= 0], -1
    else:
        ids, drop = [max(i, 0) for i in ids], 7
    batch = torch.tensor(ids, dtype=dtype).reshape(-1, 1)
    want = reference.unique_ids(batch, num_rows, drop)
    assert torch.equal(ops.unique_ids(batch, num_rows, drop), want)


gaps = st.integers(1, 300) | st.integers(1, 2**21) | st.integers(1, 2**56)


@given(st.integers(0, 300), st.lists(gaps, max_size=40))
def test_codec_round_trips_and_is_its_twin(first: int, steps: list[int]) -> None:
    ids = long([first + sum(steps[:i]) for i in range(len(steps) + 1)])
    data = ops.encode_ids(ids)
    assert torch.equal(data, reference.encode_ids(ids))
    assert torch.equal(ops.decode_ids(data, len(ids)), ids)


@pytest.mark.parametrize("last", [127, 128, 16383, 16384, 2**31, 2**62, 2**63 - 1])
def test_codec_at_the_edges(last: int) -> None:
    data = ops.encode_ids(long([last]))
    assert len(data) == (last.bit_length() + 6) // 7
    assert ops.decode_ids(data, 1).tolist() == [last]


@pytest.mark.parametrize(
    ("data", "count", "why"),
    [
        ([], 1, "count = 1"),
        ([0x80], 1, "truncated"),
        ([0x80, 0x00], 1, "overlong"),
        ([0x80] * 9 + [0x01], 1, "63 bits"),
        ([0xFF] * 8 + [0x7F, 0x01], 2, "below 2\\^63"),
        ([5, 0], 2, "increase"),
        ([5, 1], 1, "bytes left"),
    ],
)
def test_decode_refuses_broken_data(data: list[int], count: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ops.decode_ids(torch.tensor(data, dtype=torch.uint8), count)


@given(st.binary(max_size=40), st.integers(0, 40))
def test_decode_of_noise_is_an_error_or_increases(noise: bytes, count: int) -> None:
    data = torch.tensor(list(noise), dtype=torch.uint8)
    try:
        ids = ops.decode_ids(data, count)
    except ValueError:
        return
    assert torch.equal(ops.encode_ids(ids), data)


@given(st.lists(st.integers(0, 2**62), max_size=30), st.integers(1, 100))
def test_owner_is_its_twin_and_has_an_inverse(rows: list[int], num_ranks: int) -> None:
    owner, within = ops.balanced_owner(long(rows), num_ranks)
    want = reference.balanced_owner(long(rows), num_ranks)
    assert torch.equal(owner, want[0])
    assert torch.equal(within, want[1])
    assert ops.balanced_row(owner, within, num_ranks).tolist() == rows


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 16, 64])
def test_load_is_even_whatever_the_ids(num_ranks: int) -> None:
    count = 2000 * num_ranks
    g = torch.Generator().manual_seed(0)
    spread = torch.rand(3 * count, generator=g, dtype=torch.float64)
    zipf = (10 * count) ** spread  # density 1 / x
    sets = {"zipf": zipf.long().unique(), "range": torch.arange(count) + 12345}
    for stride in (2, 3, 7, num_ranks, num_ranks + 1, num_ranks**2, 64, 1000, 1024):
        sets[f"stride {stride}"] = torch.arange(count) * stride
    for name, rows in sets.items():
        load = ops.balanced_owner(rows, num_ranks)[0].bincount(minlength=num_ranks)
        # Random placement: about sqrt(2 ln n * n / R) above the mean.
        slack = 1.1 if len(rows) >= count else 1.1 * (count / len(rows)) ** 0.5
        assert load.max() <= slack * load.double().mean(), name


def test_ids_out_of_range_are_index_errors() -> None:
    for bad in (-1, 10, 2**63 - 1, -(2**63)):
        ids, rows = long([1, bad]), torch.zeros(2, 3)
        with pytest.raises(IndexError, match=rf"indices\[1\] = {bad} is outside \[0, 10\)"):
            ops.indices_to_bitmap(ids, 10)
        with pytest.raises(IndexError, match="indices"):
            ops.gather_rows(torch.zeros(10, 3), ids)
        for scatter in (ops.scatter_rows_, ops.scatter_add_rows_):
            dst = torch.zeros(10, 3)
            with pytest.raises(IndexError, match="indices"):
                scatter(dst, ids, rows + 1)
            assert not dst.any()
        with pytest.raises(IndexError, match="indices"):
            ops.coalesce_rows(ids, rows, 10)
        with pytest.raises(IndexError, match="ids"):
            ops.unique_ids(ids, 10)
