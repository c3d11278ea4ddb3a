"""What processes on an existing cluster get from the shell, and how room is asked for."""

import math
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest
import unlike_on_ray
from helpers import ALONE, REPO, SMALL

from unified_trainer.basics.errors import UserError
from unified_trainer.run.build import build
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.settings.workers import RayConfig
from unified_trainer.run.workers import cluster, group, launch
from unified_trainer.run.workers.weights import buckets_of

pytestmark = pytest.mark.slow  # seconds together

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
    assert group._environment()["env_vars"].items() >= SHELL.items()


def test_the_page_lists_them():
    page = (REPO / "docs" / "scale.md").read_text()
    assert {*re.findall(r"`([A-Z]+_\*|https?_proxy|no_proxy)`", page)} == {*cluster.FORWARDED}


def test_a_training_process_has_the_variables(ray, monkeypatch):
    """Ray runs already: its processes do not have what this one was given since."""
    monkeypatch.setenv("WANDB_API_KEY", "of the shell")

    monkeypatch.setattr(launch, "TrainingProcess", unlike_on_ray.ReadsShell)
    with launch._processes(RunConfig(ray=RayConfig()), {"CPU": 1}) as processes:
        assert ray.get(processes[0].where.remote())[0] == "of the shell"


GRPO = [*SMALL["dance_grpo"], "--rollouts.workers", "1"]


def needed(*words: object) -> int:
    return check(parse([*GRPO, *map(str, words)]), ALONE).store_bytes()


def test_the_bytes_of_samples_and_weights_on_their_way():
    """The weights of the tiny student that workers copy, and the states of every sample, as training receives them."""
    run = parse([*GRPO, "--device", "cpu", "--rollouts.workers", "0"])
    student = build(run, ALONE).trainer.roles["student"]
    weights = sum(bucket.size for bucket in buckets_of(student.weights))
    samples = run.algorithm.num_prompts * run.algorithm.num_samples
    made = samples * run.algorithm.kept_states(run.sampler) * 4 * math.prod(check(run, ALONE).latent_shape)
    assert needed() == pytest.approx(made + weights, rel=1e-3)  # a buffer is filled up to whole words
    assert needed("--rollouts.ahead", 2) == 3 * needed()
    assert needed("--rollouts.evaluation-workers", 1, "--validate-every", 1) == made + 2 * (needed() - made)
    assert needed("--rollouts.transport", "nixl") == made
    assert needed("--student.adapter.rank", 1) < made + weights / 10


def test_an_object_store_that_is_too_small_is_refused(ray):
    room = int(ray.cluster_resources()["object_store_memory"])
    cluster.check_store(room)
    with pytest.raises(UserError, match=f"`ray start --object-store-memory {4 * room}` .*rollouts.ahead"):
        cluster.check_store(4 * room)


def test_ray_of_this_run_alone_gets_the_object_store_that_it_needs(monkeypatch):
    given = []
    monkeypatch.setattr(cluster, "_init", lambda address, **how: given.append(how.get("object_store_memory")))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    share = psutil.virtual_memory().total * cluster.OF_MEMORY
    for store in (1, int(share / 2), int(2 * share)):
        cluster.connect(RayConfig(), 1, store=store)
    assert given == [None, None, int(2 * share)]


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


def test_devices_of_one_process_are_on_one_node(monkeypatch):
    """Two nodes of four devices have no room for a rollout worker of eight ranks, but for two of four."""
    nodes = [{"Alive": alive, "Resources": {"GPU": 4.0, "CPU": 16.0}} for alive in (True, True, False)]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes))
    words = [*GRPO, "--rollouts.reward-workers", "1", "--rollouts.reward-gpus", "0", "--rollouts.ranks"]
    assert cluster.has_room(group.worker_needs(parse([*words, "4", "--rollouts.workers", "2"]), "cuda"))
    needs = group.worker_needs(parse([*words, "8"]), "cuda")
    assert needs[0] == {"CPU": 8.0, "GPU": 8.0}
    with pytest.raises(UserError, match=r"the cluster has 8 GPU, and a node at most 4 of 8 for one process: .*ranks"):
        cluster.wait_for_room(RayConfig(), needs)


@pytest.mark.parametrize("error", [Exception("The current node timed out\n during startup."), OSError(2, "gone")])
def test_a_ray_that_does_not_start_is_one_sentence(monkeypatch, error):
    def init(address, **how):
        raise error

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    with pytest.raises(UserError, match="no Ray cluster can be reached, or started on this machine") as caught:
        cluster._init("local")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("needed", [True, False])
def test_a_raylet_that_dies_is_said_while_it_is_needed(monkeypatch, capsys, needed):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: needed))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as raylet:
        watching = threading.Thread(target=cluster._say_if_it_dies, args=(psutil.Process(raylet.pid),))
        watching.start()
        raylet.kill()
        watching.join(60)
    assert not watching.is_alive()
    assert capsys.readouterr().err.startswith("error: Ray ended on this machine") == needed
