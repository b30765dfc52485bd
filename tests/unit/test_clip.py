"""clip_grad_norm_ without partitioned tables gives what torch gives, and takes sparse gradients."""

import math

import pytest
import torch
from torch import nn

import commlib


def model_with_gradients(sparse=False, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 3)).to(dtype)
    model(torch.tensor([1, 1, 7, 2])).square().sum().backward()
    model.append(nn.Linear(2, 2))  # no gradient
    return model


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_torch(norm_type, max_norm, dtype):
    ours, theirs = model_with_gradients(dtype=dtype), model_with_gradients(dtype=dtype)
    total = commlib.clip_grad_norm_(ours.parameters(), max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    torch.testing.assert_close(total, expected)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_sparse_and_uncoalesced_gradients_count_like_dense_ones():
    sparse, dense = model_with_gradients(sparse=True), model_with_gradients()
    assert not sparse[0].weight.grad.is_coalesced()  # row 1 twice
    total = commlib.clip_grad_norm_(sparse.parameters(), 0.1)
    torch.testing.assert_close(total, commlib.clip_grad_norm_(dense.parameters(), 0.1))
    assert sparse[0].weight.grad.is_sparse
    torch.testing.assert_close(sparse[0].weight.grad.to_dense(), dense[0].weight.grad)


def test_one_parameter_and_none():
    weight = nn.Parameter(torch.zeros(2))
    assert float(commlib.clip_grad_norm_(weight, 1.0)) == 0
    weight.grad = torch.tensor([3.0, 4.0])
    assert float(commlib.clip_grad_norm_(weight, 1.0)) == 5
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]))
    assert float(commlib.clip_grad_norm_([], 1.0)) == 0


def test_a_norm_that_is_not_finite():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, math.inf])
    with pytest.raises(RuntimeError, match="is inf: find out which"):
        commlib.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
    assert weight.grad.tolist() == [3.0, math.inf]
    assert math.isinf(float(commlib.clip_grad_norm_([weight], 1.0)))
