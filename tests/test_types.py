"""Rows of batches."""

import pytest
import torch

from unified_trainer.basics.types import take_rows


@pytest.mark.parametrize("rows", [[1, 2], [2, 0], [1, 1], []])
def test_rows_are_those_of_an_index(rows):
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(take_rows(x, rows), x[rows])


@pytest.mark.parametrize("rows", [[-1], [2, 3], [3]])
def test_rows_that_are_not_there_are_an_error(rows):
    with pytest.raises(IndexError, match="of a tensor of 3 rows"):
        take_rows(torch.zeros(3, 4), rows)
