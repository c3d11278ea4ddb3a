"""preprocess --trajectories: the states of the teacher's ODE in FastVideo's columns, and ode_init on them."""

import dataclasses
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import (
    ALONE,
    CAPTIONS,
    CPU,
    LATENT_SHAPE,
    REPO,
    checkpoint_of,
    cut_off,
    files_of,
    flags,
    metrics_of,
    tiny_codec,
)

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.data.batch_plan import BatchPlan
from unified_trainer.data.fastvideo import ODE, TEXT_ENCODER
from unified_trainer.data.loader import Loader
from unified_trainer.data.parquet import ParquetTrajectories
from unified_trainer.data.parquet_files import read_stored_files
from unified_trainer.data.row_kinds import TrajectoryRows
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.run.build import build
from unified_trainer.run.settings.command_line import parse
from unified_trainer.sampling.teacher_ode import TeacherODE
from unified_trainer.tools.prepare.preprocess import preprocess

pytestmark = pytest.mark.slow  # seconds together

NOISE = ["initial_noise_bytes", "initial_noise_shape", "initial_noise_dtype"]
LEVELS = [1.0, 0.9375, 5 / 6, 0.625]  # of the student: 5u / (1 + 4u) at u = 1, 3/4, 1/2, 1/4
STEPS = [1.0, 0.9375, 6 / 7, 5 / 6, 0.75, 0.625, 0.6, 0.375]  # with those of the teacher: 3u / (1 + 2u) at u = k / 6
SMALL = {"video.frames": 5, "video.height": 32, "video.width": 32, "algorithm.teacher-steps": 6}
RUN = SMALL | {"method": "ode_init", "algorithm.batch-size": 2, "algorithm.micro-batch": 2, "validate-every": 0}
CAUSAL = ["--sampler.chunks.chunk-frames", "1"]


def written(folder, *words: object):
    """Write the trajectories of the four captions, and return the folder of parquet files."""
    folder.mkdir(exist_ok=True)
    (folder / "prompts.txt").write_text("\n".join(CAPTIONS))
    out = folder / "out"
    call = ["preprocess", folder / "prompts.txt", out, "--trajectories", "--rows-per-file", 2, *flags(SMALL), *words]
    assert main([*map(str, call)]) == 0
    return out


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return written(tmp_path_factory.mktemp("stored"))


def rows_of(folder) -> list[dict[str, object]]:
    return [row for file in sorted(folder.rglob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def tensor(row, name: str) -> torch.Tensor:
    assert row[f"{name}_dtype"] == "float32"
    return torch.from_numpy(np.frombuffer(row[f"{name}_bytes"], np.float32).reshape(row[f"{name}_shape"]).copy())


def built(*words: object):
    return build(parse([*flags(RUN), *map(str, words)]), ALONE)


def source(path, levels=LEVELS) -> ParquetTrajectories:
    kind = TrajectoryRows(LATENT_SHAPE, torch.tensor(levels, dtype=torch.float64), 5.0)
    return ParquetTrajectories(read_stored_files(path, kind), tiny_codec(), lanes=2)


def copied(stored, folder, change):
    """Write the table of all rows, changed, as one file, and return its folder."""
    folder.mkdir()
    table = change(pa.concat_tables(pq.read_table(file) for file in sorted(stored.glob("*.parquet"))))
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    return folder


def as_fastvideo(table: pa.Table) -> pa.Table:
    """The columns that FastVideo writes: without the state before the first step, and without our metadata."""
    return table.drop_columns(NOISE).replace_schema_metadata()


# What is written.


def test_columns_are_those_of_fastvideo_and_the_initial_noise():
    golden = json.loads((REPO / "tests" / "golden" / "fastvideo_schema.json").read_text())["ode_trajectory"]
    held = [[field.name, str(field.type)] for field in ODE]
    assert held[: len(golden)] == golden
    assert [name for name, _ in held[len(golden) :]] == NOISE


def test_rows_hold_the_states_after_each_level_and_the_noise_before_them(stored):
    """Against Euler steps that are made here, of the teacher that a run loads."""
    run = built()
    rows, teacher, codec = rows_of(stored), run.roles["teacher"], run.codec
    assert [row["caption"] for row in rows] == [*CAPTIONS]
    uncond = codec.encode_text([""])
    for row in rows:
        x, states, cond = tensor(row, "initial_noise")[None], {}, codec.encode_text([row["caption"]])
        assert x.shape[1:] == LATENT_SHAPE and abs(float(x.std()) - 1) < 0.2
        for level, following in zip(STEPS, [*STEPS[1:], 0.0], strict=True):
            at = torch.tensor([level], dtype=torch.float64)
            c, u = teacher.velocity(x, at, cond), teacher.velocity(x, at, uncond)
            x = x + (following - level) * (u + 3.0 * (c - u))
            states[following] = x[0]
        expected = torch.stack([states[level] for level in [*LEVELS[1:], 0.0]])[None]
        torch.testing.assert_close(tensor(row, "trajectory_latents"), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tensor(row, "trajectory_timesteps"), 1000 * torch.tensor(LEVELS))
        assert torch.equal(tensor(row, "text_embedding"), codec.encode_text([row["caption"]])["text"][0])
        assert (row["media_type"], row["file_name"]) == ("text", row["id"])
    assert len({row["initial_noise_bytes"] for row in rows}) == len(rows)


def test_the_noise_is_a_function_of_seed_and_prompt(stored, tmp_path):
    (tmp_path / "prompts.txt").write_text(f"another one\n{CAPTIONS[2]}\n")
    noise = []
    for seed in (0, 1):
        out = tmp_path / str(seed)
        preprocess(tmp_path / "prompts.txt", out, trajectories=True, seed=seed, settings=tuple(flags(SMALL)))
        noise.append(rows_of(out)[1]["initial_noise_bytes"])
    assert noise[0] == rows_of(stored)[2]["initial_noise_bytes"] != noise[1]


def test_an_interrupted_call_is_continued(stored, tmp_path, monkeypatch):
    """After three of four: each row is there once, as of a call that nothing interrupted."""
    solve, count = TeacherODE.solve, iter(range(3))

    def interrupted(self, *inputs):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return solve(self, *inputs)

    monkeypatch.setattr(TeacherODE, "solve", interrupted)
    (tmp_path / "prompts.txt").write_text("\n".join(CAPTIONS))
    settings = {"trajectories": True, "rows_per_file": 2, "settings": tuple(flags(SMALL))}
    with pytest.raises(KeyboardInterrupt):
        preprocess(tmp_path / "prompts.txt", tmp_path / "out", **settings)
    assert len(rows_of(tmp_path / "out")) == 3
    monkeypatch.setattr(TeacherODE, "solve", solve)
    assert rows_of(written(tmp_path)) == rows_of(stored)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm.guidance-scale", "2"], "holds other encoded clips: their guidance_scale is 3.0, now 2.0"),
        (["--sampler.num-steps", "2"], "their sigmas is"),
        (["--seed", "1"], "their seed is 0, now 1"),
        (["--teacher.pth", "x"], "--teacher.pth is not known; did you mean --teacher.path"),
        (["--method", "finetune"], "--trajectories: finetune trains on none"),
        (["--sampler.guidance-scale", "3"], "sampler.guidance_scale must be 1"),
    ],
)
def test_other_settings_and_wrong_ones_are_refused(stored, capsys, words, message):
    before = files_of(stored)
    capsys.readouterr()
    small = flags(SMALL)[:6] if "finetune" in words else flags(SMALL)
    call = ["preprocess", str(stored.parent / "prompts.txt"), str(stored), "--trajectories", *small, *words]
    assert main(call) == 2
    assert message in capsys.readouterr().err and files_of(stored) == before


def test_flags_of_trajectories_need_the_switch(tmp_path):
    with pytest.raises(UserError, match="--every-state and --seed are for trajectories of a teacher"):
        preprocess(tmp_path, tmp_path / "out", every_state=True)


# What is trained on.


class StoredNoise(Streams):
    """The noise that the trajectories of some rows began with."""

    def __init__(self, rows) -> None:
        super().__init__(0, 0)
        self._stored = torch.stack([tensor(row, "initial_noise") for row in rows])

    def noise(self, name, keys, shape):
        return self._stored


@pytest.mark.parametrize("words", [[], CAUSAL], ids=["all frames", "by chunk"])
@pytest.mark.parametrize(("size", "tolerance"), [(1, 0.0), (2, 1e-5)])
def test_stored_states_give_the_losses_of_the_teacher(stored, words, size, tolerance):
    """Bit by bit for one sample; the rounding of two depends on the teacher's batch, which was one at a time."""
    online, offline = built(*words), built(*words, "--data.path", stored)
    assert "teacher" in online.roles and "teacher" not in offline.roles
    by_caption = {row["caption"]: row for row in rows_of(stored)}
    batch = offline.trainer.loader.batch(0)[:size]
    rng = StoredNoise([by_caption[prompt] for prompt in batch.prompts])
    losses = [
        torch.stack([loss.value.detach() for loss in run.trainer.method.step(part, 0, rng, ALONE)])
        for run, part in ((online, dataclasses.replace(batch, trajectory=None)), (offline, batch))
    ]
    offline.close()
    assert len(losses[0]) == 4 and losses[0].min() > 0
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=0)


def test_stored_states_of_a_causal_teacher_give_its_losses(tmp_path):
    """And what the folder says of them names its chunks, so that those of another teacher are not added."""
    words = [*CAUSAL, "--algorithm.causal-teacher"]
    folder = written(tmp_path, *words)
    test_stored_states_give_the_losses_of_the_teacher(folder, words, 1, 0.0)
    with pytest.raises(UserError, match="holds other encoded clips: their chunks is"):
        preprocess(
            tmp_path / "prompts.txt",
            folder,
            trajectories=True,
            settings=tuple([*flags(SMALL), *CAUSAL]),
            rows_per_file=2,
        )


def test_states_stay_with_their_prompts_in_any_order_of_rows(stored, tmp_path):
    one, other = source(stored), source(copied(stored, tmp_path / "b", lambda table: table.take([2, 0, 3, 1])))
    assert [other.request(i).text for i in range(4)] == [CAPTIONS[i] for i in (2, 0, 3, 1)]
    mine, its = one.trajectory([0, 1, 2, 3]), other.trajectory([1, 3, 0, 2])
    assert torch.equal(mine.states, its.states) and torch.equal(mine.end, its.end)
    assert not torch.equal(mine.states[0], mine.states[1])
    assert mine.sigmas.tolist() == LEVELS
    one.close(), other.close()


def test_ranks_share_the_batch_of_one(stored):
    def batch(mesh: Mesh, step: int):
        plan = BatchPlan.one_update(2, 2)
        loader = Loader(source(stored), tiny_codec(), plan, LATENT_SHAPE, "", 0, mesh)
        made = loader.batch(step)
        loader.close()
        return made

    for step in (0, 3):
        whole, parts = batch(ALONE, step), [batch(Mesh(CPU, rank, 2), step) for rank in range(2)]
        assert sum((part.prompts for part in parts), ()) == whole.prompts
        assert torch.equal(torch.cat([part.trajectory.states for part in parts]), whole.trajectory.states)
        joined = parts[0].cat(parts[1]).take([1, 0]).trajectory
        assert torch.equal(joined.end, whole.trajectory.end[[1, 0]])


def test_a_resumed_run_is_the_run_without_a_stop(stored, tmp_path):
    words = [*flags(RUN), "--data.path", str(stored), "--checkpoint-every", "1", "--steps", "3"]
    assert main([*words, "--output", str(tmp_path / "whole")]) == 0
    assert main(["--resume", str(cut_off(tmp_path / "whole", tmp_path / "part", 2))]) == 0
    assert metrics_of(tmp_path / "part") == metrics_of(tmp_path / "whole")
    one, other = (checkpoint_of(tmp_path / name, 3) for name in ("whole", "part"))
    assert all(torch.equal(one[key], other[key]) for key in one)


# Files of FastVideo, and of other students.


@pytest.fixture(scope="module")
def every_state(tmp_path_factory):
    return written(tmp_path_factory.mktemp("every"), "--every-state")


def refused(*words: object) -> str:
    with pytest.raises(UserError) as caught:
        built(*words)
    return str(caught.value)


def test_every_state_serves_students_of_other_levels(stored, every_state):
    one, other = source(stored), source(every_state)
    assert torch.equal(one.trajectory([0, 1]).states, other.trajectory([0, 1]).states)
    further = source(every_state, [1.0, 0.75, 0.375]).trajectory([0])
    assert torch.equal(further.states[:, 0], other.trajectory([0]).states[:, 0])
    latents = tensor(rows_of(every_state)[0], "trajectory_latents")[0]
    assert torch.equal(further.states[0, 1:], latents[[STEPS.index(0.75) - 1, STEPS.index(0.375) - 1]])


def test_files_of_fastvideo_serve_a_student_whose_levels_they_hold(every_state, tmp_path):
    """They lack the state at the first level; the message names the file, the level and flags that work."""
    theirs = copied(every_state, tmp_path / "theirs", as_fastvideo)
    message = refused("--data.path", theirs)
    assert re.search(r"theirs/a\.parquet: row 1 \('text_\w+'\) has no state at noise level 1 of the student", message)
    assert "near them it has 0.9375. Make trajectories for this sampler: preprocess" in message
    three = ["--sampler.num-steps", 3, "--sampler.step-sigmas", 0.75, 0.5, 0.25]
    run = built("--data.path", theirs, *three)
    batch = run.trainer.loader.batch(0)
    run.close()
    captions = [CAPTIONS.index(prompt) for prompt in batch.prompts]
    ours = source(every_state, LEVELS[1:]).trajectory(captions)
    assert torch.equal(batch.trajectory.states, ours.states) and torch.equal(batch.trajectory.end, ours.end)


def test_the_way_out_works(stored):
    """The flags that the message names for missing levels make a student that the file serves."""
    message = refused("--data.path", stored, "--sampler.num-steps", 3)
    assert "no state at noise level 0.909091, 0.714286 of the student; near them it has 0.9375, 0.625" in message
    sigmas = re.search(r"--sampler\.step-sigmas (.*)$", message)[1].split()
    built("--data.path", stored, "--sampler.num-steps", 3, "--sampler.step-sigmas", *sigmas).close()


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("trajectory_latents_shape", lambda shape: [1, 4, 16, 2, 2, 4], r"row 2 .* has states \(1, 4, 16, 2, 2, 4\)"),
        ("trajectory_latents_shape", lambda shape: None, r"row 2 \(.*\) has states \(\), the run's video"),
        ("trajectory_latents_dtype", lambda kind: "int8", "row 2 .* has states of type int8, not float16"),
        ("trajectory_timesteps_bytes", lambda data: data[:-4], "row 2 .* has 3 noise levels for 4 states"),
        ("trajectory_timesteps_bytes", lambda data: data[::-1], "row 2 .* has 4 noise levels for 4 states, which must"),
        ("trajectory_timesteps_dtype", lambda kind: "no", "row 2 .* has trajectory_timesteps that cannot be read"),
        ("initial_noise_shape", lambda shape: [16, 2, 2], r"row 2 .* has initial noise \(16, 2, 2\)"),
        ("caption", lambda caption: " ", "row 2 .* has no caption"),
    ],
)
def test_a_bad_row_is_named_before_training(stored, tmp_path, column, change, message):
    def changed(table):
        place, values = table.column_names.index(column), table[column].to_pylist()
        values[1] = change(values[1])
        return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))

    folder = copied(stored, tmp_path / "bad", changed)
    kind = TrajectoryRows(LATENT_SHAPE, torch.tensor(LEVELS, dtype=torch.float64), 5.0)
    with pytest.raises(UserError, match=message):
        read_stored_files(folder, kind)


def test_files_of_another_kind_are_refused(stored, tmp_path):
    clips = pa.table({"id": ["a"], "caption": ["a"], "vae_latent_bytes": [b""]})
    pq.write_table(clips, tmp_path / "clips.parquet")
    assert "clips.parquet holds clips (kind t2v) instead of trajectories" in refused("--data.path", tmp_path)
    pq.write_table(clips.drop_columns(["vae_latent_bytes"]), tmp_path / "clips.parquet")
    assert "expected FastVideo's ode_trajectory, which preprocess --trajectories writes" in refused(
        "--data.path", tmp_path
    )
    assert "takes their captions; leave it out" in refused("--data.path", stored, "--prompts", "prompts.txt")


def test_embeddings_of_another_encoder_are_made_again(stored, tmp_path):
    """Without our metadata they are compared; other ones are not used."""

    def doubled(table):
        place = table.column_names.index("text_embedding_bytes")
        values = [(2 * np.frombuffer(data, np.float32)).tobytes() for data in table["text_embedding_bytes"].to_pylist()]
        return as_fastvideo(table).set_column(place, table.schema.field(place), pa.array(values, pa.binary()))

    three = ["--sampler.num-steps", 3, "--sampler.step-sigmas", 0.75, 0.5, 0.25]
    for name, change, said in (("same", as_fastvideo, "used; 1 compared"), ("doubled", doubled, "encoded instead")):
        run = built("--data.path", copied(stored, tmp_path / name, change), *three)
        assert any(said in note for note in run.notes), run.notes
        batch = run.trainer.loader.batch(0)
        run.close()
        assert torch.equal(batch.cond["text"], run.codec.encode_text(list(batch.prompts))["text"])
    assert pq.read_schema(stored / "clips-00000.parquet").metadata.keys() == {TEXT_ENCODER.encode()}
