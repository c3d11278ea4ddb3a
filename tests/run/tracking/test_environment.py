"""environment.jsonl: the commit is that of the package's own checkout, and of nothing else."""

import subprocess
from pathlib import Path

import pytest

import unified_trainer
from unified_trainer.run.tracking.environment import PACKAGE, checkout


def git(folder, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    return subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def package(tmp_path):
    """A package in a repository with one commit."""
    folder = tmp_path / "repository" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    git(folder.parent, "init", "--quiet")
    git(folder.parent, "add", ".")
    git(folder.parent, "commit", "--quiet", "-m", "first")
    return folder


def test_a_checkout_has_its_commit(package):
    assert checkout(package) == {"commit": git(package, "rev-parse", "HEAD").strip(), "dirty": False}


@pytest.mark.parametrize("name", ["__init__.py", "new.py"])
def test_a_changed_or_new_file_of_the_package_makes_it_dirty(package, name):
    (package.parent / "notes.txt").write_text("of something else")
    assert checkout(package)["dirty"] is False
    (package / name).write_text("changed = True")
    assert checkout(package)["dirty"] is True


def test_an_installed_package_inside_a_foreign_repository_has_none(package):
    installed = package.parent / "site-packages"
    installed.mkdir()
    (installed / "__init__.py").write_text("")
    assert checkout(installed) is None


def test_a_folder_outside_of_any_repository_has_none(tmp_path):
    assert checkout(tmp_path) is None


def test_the_whole_package_is_looked_at():
    assert Path(unified_trainer.__file__).parent == PACKAGE
