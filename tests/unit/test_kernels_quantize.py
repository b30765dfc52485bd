"""Rows in few bits: a twin in Python integers, closed cases, and the error allowed."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib import ops

BITS = (8, 6, 4)


def unpack(row: bytes, dim: int, bits: int) -> list[float]:
    """The format, read bit by bit."""
    (scale,) = struct.unpack("<f", row[:4])
    stream = int.from_bytes(row[4:], "little")
    values = []
    for idx in range(dim):
        integer = stream >> (idx * bits) & (1 << bits) - 1
        if integer >= 1 << (bits - 1):
            integer -= 1 << bits
        values.append(scale * integer * abs(integer))
    return values


@given(
    bits=st.sampled_from(BITS),
    rows=st.integers(0, 5),
    dim=st.integers(0, 600),
    seed=st.integers(0, 2**20),
)
def test_roots_come_back_within_half_a_step(bits: int, rows: int, dim: int, seed: int) -> None:
    values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    packed = ops.quantize_rows(values, bits)
    assert packed.shape == (rows, ops.packed_bytes(dim, bits))
    back = ops.dequantize_rows(packed, dim, bits)
    twin = [unpack(bytes(row.tolist()), dim, bits) for row in packed]
    torch.testing.assert_close(back, torch.tensor(twin).view(rows, dim), rtol=1e-6, atol=0)
    if dim:
        most = 2 ** (bits - 1) - 1
        peak = values.abs().amax(1, keepdim=True)
        roots = [(x.abs() / peak).sqrt() * most * x.sign() for x in (values, back)]
        assert bool(((roots[0] - roots[1]).abs() <= 0.501).all())


@pytest.mark.parametrize("bits", BITS)
def test_a_row_that_is_not_finite_is_nan_and_leaves_its_neighbours(bits: int) -> None:
    values = torch.ones(5, 9)
    values[1, 3], values[2, 8], values[3] = float("nan"), float("-inf"), 0.0
    back = ops.dequantize_rows(ops.quantize_rows(values, bits), 9, bits)
    assert back[1].isnan().all() and back[2].isnan().all()
    assert torch.equal(back[[0, 4]], torch.ones(2, 9)) and torch.equal(back[3], torch.zeros(9))


@pytest.mark.parametrize("bits", BITS)
def test_extremes(bits: int) -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([[largest, -largest, 0.0], [1e-42, 0.0, -1e-42], [-0.0, 0.0, 0.0]])
    back = ops.dequantize_rows(ops.quantize_rows(values, bits), 3, bits)
    torch.testing.assert_close(back[0], values[0])
    assert torch.equal(back[1:], torch.zeros(2, 3))  # too small for a scale: kept by feedback


@pytest.mark.parametrize("bits", BITS)
def test_any_number_of_threads_gives_the_same_bits(bits: int) -> None:
    values = torch.randn(3000, 130)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(ops.quantize_rows(values, bits))
    torch.set_num_threads(before)
    assert torch.equal(*results)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="bits = 5"):
        ops.quantize_rows(torch.zeros(1, 4), 5)
    with pytest.raises(TypeError, match="float32"):
        ops.quantize_rows(torch.zeros(1, 4, dtype=torch.float16), 8)
    with pytest.raises(ValueError, match=r"packed\.shape\[1\]"):
        ops.dequantize_rows(torch.zeros(1, 8, dtype=torch.uint8), 8, 8)
