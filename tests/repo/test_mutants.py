"""The mutants of tests/mutants/mutants.toml fit the package and the tests as they are; `make mutants` plants them."""

import ast
import functools
import sys

import pytest
from helpers import REPO
from rules import each

sys.path.insert(0, str(REPO / "scripts"))
from mutants import Mutant, load

MUTANTS = load()


@functools.cache
def names_in(file: str) -> set[str]:
    """Return the names of the test functions of a file below tests/."""
    nodes = ast.walk(ast.parse((REPO / "tests" / file).read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.slow
@each(MUTANTS, lambda mutant: mutant.name)
def test_a_mutant_applies_and_names_its_test(mutant: Mutant):
    source = (REPO / "unified_trainer" / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.find) == 1, f"{mutant.file}: `find` must occur exactly once"
    ast.parse(source.replace(mutant.find, mutant.replace))
    file, _, test = mutant.killed_by.partition("::")
    assert test in names_in(file)


def test_no_mutant_is_named_twice():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) >= 100 and len(names) == len(set(names))
