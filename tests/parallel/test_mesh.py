"""The arithmetic of a mesh, and what is refused before any weight is read."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers import CPU, SMALL, small_model
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.parallel.torchrun import where
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig
from unified_trainer.run.plan.plan import check
from unified_trainer.run.settings.command_line import parse

SIZES = st.integers(1, 5)


@given(SIZES, SIZES, SIZES)
def test_the_ranks_left_are_shards(replicate, shard, sequence):
    ranks = replicate * shard * sequence
    config = ParallelConfig(replicate=replicate, sequence=sequence).degrees(ranks)
    assert config == ParallelConfig(replicate=replicate, shard=shard, sequence=sequence)
    assert ParallelConfig(replicate=replicate, shard=shard, sequence=sequence).degrees(ranks) == config


@given(SIZES, SIZES, SIZES)
def test_a_sequence_group_holds_one_share_of_the_samples(replicate, shard, sequence):
    """Every share is held by `sequence` ranks, which split its tokens between them."""
    ranks = replicate * shard * sequence
    config = ParallelConfig(replicate, shard, sequence)
    meshes = [Mesh(CPU, rank, ranks, config) for rank in range(ranks)]
    assert {mesh.data_size for mesh in meshes} == {replicate * shard}
    held = [(mesh.data_rank, mesh.sequence_rank) for mesh in meshes]
    assert sorted(held) == [(data, part) for data in range(replicate * shard) for part in range(sequence)]


@given(st.integers(1, 64), st.integers(1, 6), st.integers(0, 6), st.integers(1, 6))
def test_what_does_not_multiply_to_the_ranks_is_refused_with_the_arithmetic(ranks, replicate, shard, sequence):
    config = ParallelConfig(replicate=replicate, shard=shard, sequence=sequence)
    if (shard == 0 and ranks % (replicate * sequence) == 0) or replicate * shard * sequence == ranks:
        assert math.prod((replicate, config.degrees(ranks).shard, sequence)) == ranks
        return
    told = shard or f"({ranks} // {replicate * sequence})"
    with pytest.raises(ValueError, match="must be the") as error:
        config.degrees(ranks)
    assert f"the {ranks} ranks, but {replicate} x {told} x {sequence} = " in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--parallel.replicate", "2"), "must be the 1 ranks, but 2 x (1 // 2) x 1 = 0"),
        (("--parallel.offload-weights",), "parallel.offload_weights needs more than one rank"),
        (("--parallel.sequence", "3"), "must be the 1 ranks"),
    ],
)
def test_a_single_process_has_one_mesh(flags, said, capsys, run_folder):
    assert main(["--output", str(run_folder), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not run_folder.exists()


def test_heads_that_do_not_divide_are_refused_from_the_config_alone():
    run = parse(SMALL["dance_grpo"])
    with pytest.raises(UserError, match=r"parallel\.sequence \(3\) must divide the 4 attention heads of student\.path"):
        check(run, Mesh(CPU, 0, 3, ParallelConfig(shard=1, sequence=3)))
    check(run, Mesh(CPU, 0, 2, ParallelConfig(shard=1, sequence=2)))
    check(run, Mesh(CPU))


def test_one_process_agrees_with_itself():
    alone = Mesh(CPU)
    alone.assert_same("anything")
    assert (alone.any(True), alone.any(False), alone.max(2.5), alone.data_rank, alone.data_size) == (
        True,
        False,
        2.5,
        0,
        1,
    )


def test_the_comparison_of_passes_can_be_left_out(monkeypatch):
    points = []
    monkeypatch.setattr(Mesh, "assert_same", lambda _, point: points.append(point))
    for compare in (True, False):
        mesh = Mesh(CPU, config=ParallelConfig(shard=1, compare_passes=compare))
        with Frozen("teacher", Backbone(small_model(), mesh), RoleConfig()).running():
            points.append(compare)
    assert points == ["pass of teacher without gradient", True, False]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
def test_an_environment_variable_that_is_no_integer_is_named(name, monkeypatch):
    monkeypatch.setenv(name, "two")
    with pytest.raises(UserError, match=rf"environment variable {name} must be an integer of at least \d, not 'two'"):
        Mesh.join("cpu")
    assert where() == (" on rank 0" if name == "WORLD_SIZE" else "")


def test_ranks_that_torchrun_did_not_start_are_told_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT is not set: start"):
        Mesh.join("cpu")


def test_transposed_rows_are_gathered_in_contiguous_parts(monkeypatch):
    """NCCL takes no others; gloo, which tests have, does."""

    def all_gather(parts, rows, group):
        assert all(part.is_contiguous() for part in (*parts, rows))
        for part in parts:
            part.copy_(rows)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(Mesh, "data_size", 2)
    monkeypatch.setattr(Mesh, "_group", lambda mesh, axis: None)
    rows = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(Mesh(CPU).gather(rows), torch.cat([rows, rows]))
