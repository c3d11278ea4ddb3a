"""What the test run itself checks of the product's calls: types, and shapes where a function names them."""

import checking
import jaxtyping
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from unified_trainer.basics.types import check_finite, take_rows
from unified_trainer.parallel.mesh import ParallelConfig


@pytest.mark.parametrize("call", [lambda: ParallelConfig(sequence="two"), lambda: take_rows(torch.zeros(2), 1)])
def test_a_wrong_type_is_an_error(call):
    with pytest.raises(BeartypeCallHintViolation):
        call()


def test_a_wrong_shape_is_an_error():
    check_finite(torch.zeros(1, 1, 1, 1, 1), "student")
    with pytest.raises(jaxtyping.TypeCheckError):
        check_finite(torch.zeros(1, 1, 1), "student")


@pytest.mark.parametrize("turn", range(2))
def test_the_first_calls_of_each_test_are_checked(turn):
    for _ in range(checking.CALLS):
        with pytest.raises(BeartypeCallHintViolation):
            ParallelConfig(sequence="two")
    assert ParallelConfig(sequence="two").sequence == "two"


def test_without_checks_the_function_decides(unchecked):
    assert ParallelConfig(sequence=2.0).sequence == 2.0
