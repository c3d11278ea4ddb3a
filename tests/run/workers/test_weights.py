"""Weights as they travel to workers, through the object store and straight from memory to memory."""

import dataclasses
import os
from pathlib import Path

import direct_weights
import pytest
import torch
import torch.distributed as dist
from direct_weights import weights
from helpers import ALONE, REPO, shell
from hypothesis import given, settings
from hypothesis import strategies as st
from reader import Reader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from unified_trainer.parallel.fsdp import to_local
from unified_trainer.run.workers import weights as module
from unified_trainer.run.workers.weights import PIECE, Weights, WeightSender, checksum, copy_parts


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(weight) for name, weight in weights().items()}


def sent(trained: dict[str, torch.Tensor], rounded=()) -> Weights:
    return WeightSender(ALONE, rounded=rounded).pack(3, trained, 3)


@pytest.mark.parametrize("bucket", [2**26, 20])
def test_weights_arrive_bit_for_bit(monkeypatch, bucket):
    """In one buffer, and in several, of which the first is larger than a bucket because one tensor is."""
    monkeypatch.setattr(module, "BUCKET", bucket)
    there, packed = zeros(), sent(weights())
    copy_parts([packed], there)
    assert len(packed.buffers) == (1 if bucket > 20 else 3)
    for name, weight in weights().items():
        assert torch.equal(there[name], weight)


def test_weights_that_passes_round_travel_rounded():
    """In half of the bytes, to who holds them so; others are as they were."""
    single = {"a": torch.linspace(0, 1, 96), "b": torch.ones(4, dtype=torch.float64) / 3, "c": torch.tensor(7)}
    whole, half = sent(single), sent(single, {"a"})
    there = {name: torch.zeros_like(weight) for name, weight in single.items()} | {"a": torch.zeros(96).bfloat16()}
    copy_parts([half], there)
    assert torch.equal(there["a"], single["a"].bfloat16()) and not torch.equal(there["a"].float(), single["a"])
    assert torch.equal(there["b"], single["b"]) and torch.equal(there["c"], single["c"])
    assert whole.buffers[0].nbytes - half.buffers[0].nbytes == 192


def test_a_changed_byte_is_refused_and_changes_no_weight():
    packed, there = sent(weights()), zeros()
    packed.buffers[0][5] ^= 1
    with pytest.raises(RuntimeError, match="weights of version 3 were damaged"):
        copy_parts([packed], there)
    assert not any(bool(weight.any()) for weight in there.values())


def test_a_missing_part_is_refused():
    whole, fewer = sent(weights()), sent({name: weight for name, weight in weights().items() if name != "b"})
    packed = dataclasses.replace(fewer, signature=whole.signature)
    with pytest.raises(RuntimeError, match="weights of version 3 arrived with 7 of 9 numbers"):
        copy_parts([packed], zeros())


@pytest.fixture
def second_of_two():
    """This process as the second of two ranks that share the rows of weights."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("bucket", "read"), [(16, ["c", "a", "a", "b"]), (128, ["abc", "ab", "ab"])])
def test_a_rank_takes_its_rows_alone(monkeypatch, second_of_two, bucket, read):
    """Of the parts of three training ranks, it reads only the buffers with rows of its own."""
    monkeypatch.setattr(module, "BUCKET", bucket)
    whole = {"a": torch.arange(14.0).view(7, 2), "b": torch.arange(3.0), "c": torch.tensor(7.0)}
    there = {
        name: distribute_tensor(torch.zeros_like(whole[name]), second_of_two, [Shard(0)], src_data_rank=None)
        for name in ("a", "b")
    } | {"c": torch.tensor(0.0)}
    held, parts = {"a": whole["a"][4:], "b": whole["b"][2:], "c": whole["c"]}, []
    for first in range(3):
        rows = {"a": whole["a"][3 * first : 3 * first + 3], "b": whole["b"][first : first + 1]}
        rows |= {"c": whole["c"]} if not first else {}
        first_rows = {"a": 3 * first, "b": first, "c": 0}
        parts.append(dataclasses.replace(sent(rows), signature=module.signature(whole), first_rows=first_rows))
    needed = [part.needed_by(there) for part in parts]
    assert ["".join(one.places) for part in needed for one in part.buckets] == read
    copy_parts(needed, there)
    assert all(torch.equal(to_local(there[name]), rows) for name, rows in held.items())
    with pytest.raises(RuntimeError, match="arrived with 5 of 8 numbers"):
        copy_parts(needed[:2], there)


@pytest.mark.slow
def test_the_workers_of_a_node_read_one_copy_of_what_was_put_once(ray, monkeypatch):
    """Two workers read the same bytes of the node's shared memory, in which the rank has put them."""
    held = {"a": torch.arange(2.0**18)}  # 1 MiB: Ray sends small objects with the call
    puts, put = [], ray.put
    monkeypatch.setattr(module.ray, "put", lambda *given, **how: puts.append(given) or put(*given, **how))
    reference = WeightSender(ALONE).send(3, held, 3)
    readers = [ray.remote(Reader).options(num_cpus=0).remote({"a": torch.zeros(1)}) for _ in range(2)]
    places = ray.get([reader.place_of.remote(reference) for reader in readers])
    assert len(puts) == 1 and places[0] == places[1]
    (_, inode, _), *_ = places[0]
    assert inode > 0  # a file, which the processes share, and no memory of their own


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_checksum_sees_every_word_and_its_place(data):
    """A flipped bit, and two words that change places, also between two pieces."""
    words = torch.zeros(PIECE + 7, dtype=torch.int32)
    words[::3] = data.draw(st.sampled_from([1, -1, -(2**31), 2**31 - 1, 0x3F800000]))
    numbers = st.integers(0, len(words) - 1)
    one, other, bit = data.draw(numbers), data.draw(numbers), data.draw(st.integers(0, 7))
    before = checksum(words.view(torch.uint8))
    flipped = words.clone()
    flipped.view(torch.uint8)[4 * one] ^= 1 << bit
    assert checksum(flipped.view(torch.uint8)) != before
    swapped = words.clone()
    swapped[[one, other]] = words[[other, one]]
    assert (checksum(swapped.view(torch.uint8)) == before) == torch.equal(swapped, words)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("a", torch.zeros(2, 3)),
        ("b", torch.zeros(2)),
        ("c", torch.tensor([7])),
    ],
)
def test_weights_of_another_model_are_refused(name, other):
    with pytest.raises(RuntimeError, match=f"holds other weights than are trained: .*'{name}'"):
        copy_parts([sent(weights())], weights() | {name: other})
    fewer = {key: weight for key, weight in weights().items() if key != "c"}
    with pytest.raises(RuntimeError, match="other weights than are trained: 2 there, 3 here"):
        copy_parts([sent(weights())], fewer)


@pytest.mark.slow
@pytest.mark.kill
def test_weights_go_straight_from_memory_to_memory(warm):
    """A worker reads a version as it was when it was sent, whatever training does meanwhile, as long as it is needed.

    A killed worker, started again, reads it too, and so does each rank of a replica; a changed byte is refused.
    """
    path = os.pathsep.join([str(REPO), str(Path(__file__).parent)])
    done = shell(str(warm.python), direct_weights.__file__, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
