"""A checkout that is on Python's path, and not installed, says so and runs."""

from importlib import metadata

from helpers import ALONE

from unified_trainer.basics.versions import version_of
from unified_trainer.run.tracking.environment import environment


def test_a_run_of_a_package_that_is_not_installed(monkeypatch):
    found = metadata.distribution

    def without(name: str) -> metadata.Distribution:
        if name == "unified-trainer":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "distribution", without)
    assert version_of("torch") == metadata.version("torch")
    assert environment([], 0, 0, ALONE)["versions"]["unified-trainer"] == "not installed"
