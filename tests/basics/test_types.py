"""Rows of batches, and conditions of named tensors."""

import pytest
import torch

from unified_trainer.basics.types import Condition, take_rows


@pytest.mark.parametrize("rows", [[1, 2], [2, 0], [1, 1], []])
def test_rows_are_those_of_an_index(rows):
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(take_rows(x, rows), x[rows])


@pytest.mark.parametrize("rows", [[-1], [2, 3], [3]])
def test_rows_that_are_not_there_are_an_error(rows):
    with pytest.raises(IndexError, match="of a tensor of 3 rows"):
        take_rows(torch.zeros(3, 4), rows)


def two_named(samples: int) -> Condition:
    return Condition({"text": torch.arange(samples * 6.0).view(samples, 3, 2), "vector": torch.arange(samples * 1.0)})


def test_a_condition_keeps_the_rows_of_all_its_tensors_together():
    cond = two_named(4)
    assert len(cond) == 4
    for rows in ([1, 2], [3, 0, 3]):
        taken = cond.take(rows)
        assert all(torch.equal(taken[name], cond[name][rows]) for name in ("text", "vector"))
    joined = cond.take([2]).expand(2).cat(cond)
    assert all(torch.equal(joined[name], cond[name][[2, 2, 0, 1, 2, 3]]) for name in ("text", "vector"))
    assert cond.take([2]).expand(2)["text"].stride(0) == 0  # no copy


def test_conditions_that_do_not_fit_are_not_joined():
    with pytest.raises(ValueError, match=r"\['text', 'vector'\] and of \['text'\] cannot be joined"):
        two_named(2).cat(Condition({"text": torch.zeros(2, 3, 2)}))
    with pytest.raises(ValueError, match=r"have \{'text': 2, 'vector': 3\}"):
        Condition({"text": torch.zeros(2, 3), "vector": torch.zeros(3)})
