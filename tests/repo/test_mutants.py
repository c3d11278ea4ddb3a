"""The mutants of tests/mutants/mutants.toml fit the package and the tests as they are; `make mutants` plants them."""

import ast
import re
import sys
from collections.abc import Iterator

import pytest
from helpers import REPO

sys.path.insert(0, str(REPO / "scripts"))
from mutants import Mutant, load


def faults(mutant: Mutant) -> Iterator[str]:
    source = (REPO / "unified_trainer" / mutant.file).read_text(encoding="utf-8")
    if source.count(mutant.find) == 1:
        ast.parse(source.replace(mutant.find, mutant.replace))
    else:
        yield f"{mutant.file} holds `find` {source.count(mutant.find)} times"
    file, _, test = mutant.killed_by.partition("::")
    if not re.search(rf"^def {test}\(", (REPO / "tests" / file).read_text(encoding="utf-8"), re.M):
        yield f"{file} has no {test}"


@pytest.mark.slow
def test_every_mutant_applies_and_names_its_test():
    mutants = load()
    assert [f"{mutant.name}: {fault}" for mutant in mutants for fault in faults(mutant)] == []
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 60
