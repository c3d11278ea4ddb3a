"""What processes on an existing cluster get from the shell, and how room is asked for."""

import re
from types import SimpleNamespace

import pytest
import unlike_on_ray
from helpers import REPO

from unified_trainer.basics.errors import UserError
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.settings.workers import RayConfig
from unified_trainer.run.workers import cluster, launch, workers

SHELL = {"WANDB_API_KEY": "k", "HF_HOME": "/shared/hf", "NCCL_SOCKET_IFNAME": "eth1", "http_proxy": "p:1"}


class Looked(Exception):
    """The wait has looked once."""


def test_variables_of_the_shell_are_forwarded_and_no_others(monkeypatch):
    for name, text in {**SHELL, "CUDA_VISIBLE_DEVICES": "3", "RANK": "1", "AWS_SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(name, text)
    found = cluster.forwarded()
    assert found.items() >= SHELL.items() and not found.keys() & {
        "CUDA_VISIBLE_DEVICES",
        "RANK",
        "AWS_SECRET_ACCESS_KEY",
    }
    assert workers._environment()["env_vars"].items() >= SHELL.items()


def test_the_page_lists_them():
    page = (REPO / "docs" / "scale.md").read_text()
    assert {*re.findall(r"`([A-Z]+_\*|https?_proxy|no_proxy)`", page)} == {*cluster.FORWARDED}


def test_a_training_process_has_the_variables(ray, monkeypatch):
    """Ray runs already: its processes do not have what this one was given since."""
    monkeypatch.setenv("WANDB_API_KEY", "of the shell")

    monkeypatch.setattr(launch, "TrainingProcess", unlike_on_ray.ReadsShell)
    with launch._processes(RunConfig(ray=RayConfig()), {"CPU": 1}) as processes:
        assert ray.get(processes[0].where.remote())[0] == "of the shell"


def test_a_placement_group_asks_for_room_while_the_run_waits(ray, monkeypatch):
    """By which an autoscaler sees the demand; it is gone with the wait."""
    seen, needs = [], [{"CPU": 1.0, "of_this_test": 1.0}] * 2

    def look(seconds):
        seen.extend(pending())
        raise Looked

    def pending():
        table = ray.util.placement_group_table().values()
        return [one for one in table if "of_this_test" in str(one["bundles"]) and one["state"] != "REMOVED"]

    monkeypatch.setattr(cluster, "LATER", SimpleNamespace(wait=look))
    with pytest.raises(Looked):
        cluster.wait_for_room(RayConfig(address="first:6379"), needs)
    assert len(seen) == 1 and len(seen[0]["bundles"]) == 2
    with pytest.raises(
        UserError, match="the run needs 2 of_this_test for 2 processes on Ray, but the cluster has 0 of_"
    ):
        cluster.wait_for_room(RayConfig(), needs)  # of this machine alone: no node will join
    assert not pending()
