"""Hashes and count sketches: the mmh3 package as oracle, twins, closed forms, the error law."""

import mmh3
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib import ops
from tests import reference
from tests.reference import same_bits

int64s = st.integers(-(2**63), 2**63 - 1)
seeds = st.integers(0, 2**32 - 1)
dims = st.sampled_from([0, 1, 3, 8, 63, 64, 65, 530])
dtypes = st.sampled_from(ops.ROW_DTYPES)


def make(count: int, dim: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed % 2**31)
    ids = (torch.randperm(4 * count + 1, generator=g)[:count] * 10**9).sort().values
    return ids, torch.randn(count, dim, generator=g, dtype=torch.float64).to(dtype)


@given(st.lists(int64s, max_size=20), seeds)
def test_murmur3_is_the_mmh3_package(keys: list[int], seed: int) -> None:
    want = [mmh3.hash(k.to_bytes(8, "little", signed=True), seed, signed=False) for k in keys]
    assert ops.murmur3_32(torch.tensor(keys, dtype=torch.int64), seed).tolist() == want
    assert [reference.murmur3_32(k % 2**64, seed) for k in keys] == want


@pytest.mark.parametrize("row", [0, 5, 2**31 + 5, 2**40 + 1, 2**62])
@pytest.mark.parametrize("num_buckets", [1, 7, 2**16 + 1])
def test_bucket_and_sign_of_large_rows(row: int, num_buckets: int) -> None:
    seed, num_hashes = 2**32 - 3, 5  # seed + 2j wraps
    sketch = ops.sketch_encode(torch.tensor([row]), torch.ones(1, 1), num_hashes, num_buckets, seed)
    for j in range(num_hashes):
        (bucket,) = sketch[j, :, 0].nonzero()[:, 0].tolist()
        assert bucket == reference.bucket_of(row, num_buckets, seed, j)
        assert sketch[j, bucket, 0] == reference.sign_of(row, seed, j)


@given(
    st.integers(0, 40),
    dims,
    dtypes,
    st.integers(1, 5),
    st.integers(1, 30),
    seeds,
    st.sampled_from([1.0, 1 / 3]),
)
def test_encode_is_its_twin(
    count: int,
    dim: int,
    dtype: torch.dtype,
    num_hashes: int,
    num_buckets: int,
    seed: int,
    scale: float,
) -> None:
    ids, values = make(count, dim, dtype, seed)
    got = ops.sketch_encode(ids, values, num_hashes, num_buckets, seed, scale)
    want = reference.sketch_encode(ids, values, num_hashes, num_buckets, seed, scale)
    assert same_bits(got, want)


@pytest.mark.parametrize("decoder", ["mean", "median"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decode_to_halves_rounds_once(dtype: torch.dtype, decoder: str) -> None:
    sketch, ids = torch.randn(3, 20, 300), torch.arange(50)
    got = ops.sketch_decode(sketch, ids, 5, decoder, 0.3, dtype)
    assert torch.equal(got, ops.sketch_decode(sketch, ids, 5, decoder, 0.3).to(dtype))
    with pytest.raises(TypeError, match="float64"):
        ops.sketch_decode(sketch, ids, 5, decoder, 0.3, torch.float64)
    with pytest.raises(TypeError, match="float64"):
        ops.sketch_decode(sketch.double(), ids, 5, decoder, 0.3, dtype)


@given(
    st.integers(0, 25),
    dims,
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 6),
    st.integers(1, 30),
    seeds,
    st.sampled_from(["mean", "median"]),
    st.sampled_from([1.0, 0.3]),
)
def test_decode_is_its_twin(
    count: int,
    dim: int,
    dtype: torch.dtype,
    num_hashes: int,
    num_buckets: int,
    seed: int,
    decoder: str,
    scale: float,
) -> None:
    ids, values = make(count, dim, dtype, seed)
    if values.numel():
        values.view(-1)[0] = float("nan")
    sketch = reference.sketch_encode(ids, values, num_hashes, num_buckets, seed)
    got = ops.sketch_decode(sketch, ids, seed, decoder, scale)  # type: ignore[arg-type]
    assert same_bits(got, reference.sketch_decode(sketch, ids, seed, decoder, scale))


@given(
    st.integers(0, 40),
    dims,
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 4),
    st.integers(1, 25),
    seeds,
)
def test_peel_is_its_twin(
    count: int, dim: int, dtype: torch.dtype, num_hashes: int, num_buckets: int, seed: int
) -> None:
    ids, values = make(count, dim, dtype, seed)
    sketch = reference.sketch_encode(ids, values, num_hashes, num_buckets, seed)
    before = sketch.clone()
    got, want = ops.sketch_peel(sketch, ids, seed), reference.sketch_peel(sketch, ids, seed)
    assert torch.equal(got[1], want[1])
    assert same_bits(got[0], want[0])
    assert same_bits(sketch, before)


@pytest.mark.parametrize("num_union", [1000, 4000])
def test_three_hashes_and_1_3_buckets_a_row_peel_everything(num_union: int) -> None:
    complete = 0
    for seed in range(30):
        ids, values = make(num_union, 4, torch.float64, seed)
        values = (values * 2**20).round()  # integers: sums are exact, so peeling is
        num_buckets = -(-13 * num_union // 30)
        sketch = ops.sketch_encode(ids, values, 3, num_buckets, seed)
        got, peeled = ops.sketch_peel(sketch, ids, seed)
        assert torch.equal(got[peeled], values[peeled])
        complete += bool(peeled.all())
    assert complete >= 28


def test_two_rows_that_share_every_bucket_do_not_peel() -> None:
    ids, values = torch.tensor([4, 9]), torch.tensor([[2.0], [3.0]])
    sketch = ops.sketch_encode(ids, values, 2, 1, 0)
    got, peeled = ops.sketch_peel(sketch, ids, 0)
    assert not peeled.any()
    assert torch.equal(got, ops.sketch_decode(sketch, ids, 0, "median"))


def test_halves_of_opposite_sign_in_one_bucket_do_not_overflow() -> None:  # C07
    ids = torch.arange(2)
    seed = next(s for s in range(100) if reference.sign_of(0, s, 0) == reference.sign_of(1, s, 0))
    values = torch.tensor([[40000.0], [-40000.0]], dtype=torch.float16)
    assert ops.sketch_encode(ids, values, 1, 1, seed).item() == 0.0
    both = ops.sketch_encode(ids, values.abs(), 1, 1, seed)
    assert both.abs().item() == 80000.0


@pytest.mark.parametrize(("num_hashes", "num_buckets"), [(1, 200), (3, 150), (4, 500)])
def test_mean_follows_the_error_law(num_hashes: int, num_buckets: int) -> None:
    num_union, errors = 600, []
    for seed in range(20):
        ids, values = make(num_union, 32, torch.float64, seed)
        sketch = ops.sketch_encode(ids, values, num_hashes, num_buckets, 7919 * seed)
        got = ops.sketch_decode(sketch, ids, 7919 * seed, "mean")
        errors.append(float((got - values).square().sum() / values.square().sum()))
    law = (num_union - 1) / (num_hashes * num_buckets)
    assert sum(errors) / len(errors) == pytest.approx(law, rel=0.05)


def test_encode_is_linear_over_ranks() -> None:
    ids, values = make(50, 8, torch.float64, 3)
    values = (values * 2**20).round()
    halves = [ops.sketch_encode(ids[s::2], values[s::2], 3, 20, 9) for s in (0, 1)]
    assert torch.equal(halves[0] + halves[1], ops.sketch_encode(ids, values, 3, 20, 9))
