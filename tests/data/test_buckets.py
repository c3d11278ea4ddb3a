"""Buckets: the size that each clip gets, and batches of one shape in an order that nothing but the seed changes."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from clip_files import write_clips
from helpers import ALONE, CPU, tiny_codec
from PIL import Image
from real_clips import grays, write_exactly

from unified_trainer.basics.errors import UserError
from unified_trainer.data.batch_plan import BatchPlan, Position
from unified_trainer.data.bucket_loader import BucketLoader
from unified_trainer.data.buckets import BucketClips, fitting, sizes_of
from unified_trainer.data.captioned import CaptionedVideo
from unified_trainer.data.clips import DataConfig, VideoConfig
from unified_trainer.data.media import TooShortError
from unified_trainer.data.parquet import ParquetClips
from unified_trainer.data.parquet_files import read_stored_files
from unified_trainer.data.ramp_up import RampUpConfig, ramped
from unified_trainer.data.raw_clips import encode_videos
from unified_trainer.data.row_kinds import ClipRows
from unified_trainer.data.video_reader import read_video
from unified_trainer.parallel.mesh import Mesh

SHAPES = ((16, 2, 4, 4), (16, 1, 4, 8), (16, 1, 8, 4))
COUNTS = (11, 6, 2)  # clips of each
WIDE, TALL, LONG, SMALL = "5x32x64", "5x64x32", "9x32x64", "5x16x32"


def sizes(*buckets: str) -> tuple[VideoConfig, ...]:
    return sizes_of(DataConfig(buckets=buckets), VideoConfig(81, 480, 832, 8))


def named(size: VideoConfig | None) -> str:
    return "" if size is None else f"{size.frames}x{size.height}x{size.width}"


@pytest.mark.parametrize(
    ("frames", "height", "width", "expected"),
    [
        (9, 320, 640, LONG),  # as many frames as it fills
        (8, 320, 640, WIDE),
        (9, 640, 320, TALL),  # the aspect ratio comes before the frames
        (4, 32, 64, ""),  # too short for all
        (5, 16, 32, SMALL),  # not enlarged
        (5, 40, 80, WIDE),
        (5, 8, 16, SMALL),  # enlarged as little as possible
        (9, 480, 500, LONG),  # log(1.04) is nearer to log(2) than to log(1/2)
    ],
)
def test_a_clip_goes_to_the_nearest_aspect_ratio_and_then_to_the_longest_it_fills(frames, height, width, expected):
    for order in ((WIDE, TALL, LONG, SMALL), (SMALL, LONG, TALL, WIDE)):
        assert named(fitting(sizes(*order), frames, height, width)) == expected


@pytest.mark.parametrize("text", ["49x480", "49 x 480 x 832", "axbxc", "", "-5x32x32", "49x480x832x3"])
def test_a_text_that_is_no_size_is_refused(text):
    with pytest.raises(UserError, match=r"data\.buckets: .* is no size: write FRAMESxHEIGHTxWIDTH"):
        sizes("5x32x32", text)


def test_a_video_is_read_at_the_size_of_its_bucket(tmp_path):
    """By its own frames and its picture as it is shown, also of a part, and of an image, which has one frame."""
    wide = write_exactly(tmp_path / "wide.mkv", grays(9, 40, 80), 8)
    tall = write_exactly(tmp_path / "tall.mkv", grays(7, 80, 40), 8)
    Image.fromarray(grays(1, 50, 50)[0]).save(tmp_path / "a.png")
    part = CaptionedVideo("part", wide, ("a",), start=0.25, end=0.9)

    def shape(video, *buckets) -> tuple[int, ...]:
        return read_video(video, sizes(*buckets)).frames.shape[:3]

    assert shape(CaptionedVideo("wide", wide, ("a",)), TALL, WIDE, LONG) == (9, 32, 64)
    assert shape(CaptionedVideo("tall", tall, ("a",)), LONG, WIDE, TALL) == (5, 64, 32)
    assert shape(CaptionedVideo("tall", tall, ("a",)), LONG, WIDE) == (5, 32, 64)
    assert shape(part, LONG, WIDE) == (5, 32, 64)
    assert shape(CaptionedVideo("image", tmp_path / "a.png", ("a",)), LONG, "1x32x32") == (1, 32, 32)
    with pytest.raises(TooShortError, match=r"tall\.mkv: too short: 7 frames at 8 per second, the shortest .* has 9"):
        shape(CaptionedVideo("tall", tall, ("a",)), LONG, "13x64x32")


def test_turned_pictures_count_as_they_are_shown(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.fromarray(grays(1, 40, 80)[0]).save(tmp_path / "a.png", exif=exif)
    clip = read_video(CaptionedVideo("a", tmp_path / "a.png", ("a",)), sizes("1x32x64", "1x64x32"))
    assert clip.frames.shape[:3] == (1, 64, 32) and clip.shown == (80, 40)


def clips(counts=COUNTS, captions=1) -> BucketClips:
    """Clips of each shape, in turn; all values of a clip are its number."""
    shapes = [shape for i in range(max(counts)) for shape, count in zip(SHAPES, counts, strict=True) if i < count]
    encoded = [torch.full(shape, float(i)) for i, shape in enumerate(shapes)]
    clip_of = tuple(i for i in range(len(shapes)) for _ in range(captions))
    texts = tuple(f"caption {row}" for row in range(len(clip_of)))
    return BucketClips(texts, encoded, clip_of=clip_of)


def loader(batch=2, mesh=ALONE, source=None, seed=0, shuffle=True, ramp=None) -> BucketLoader:
    source = source or clips()
    plan = BatchPlan.one_update(batch, batch)
    plan = ramped(plan, ramp) if ramp else plan
    options = {"shapes": source.shapes, "shuffle": shuffle}
    return BucketLoader(source, tiny_codec(), plan, SHAPES[0], "", seed, mesh, **options)


def seen(one: BucketLoader, steps: int, first: int = 0) -> list[tuple[int, ...]]:
    return [tuple(one.rows(step)[0]) for step in range(first, first + steps)]


def test_a_batch_has_one_shape_and_says_it():
    one, shapes = loader(batch=2), Counter()
    for step in range(18):
        batch = one.batch(step)
        assert batch.latents.shape[1:] == batch.latent_shape and batch.latent_shape in SHAPES
        assert batch.latents[:, 0, 0, 0, 0].tolist() == list(batch.prompt_ids)
        shapes[batch.latent_shape] += 1
    assert set(shapes) == set(SHAPES)


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_every_clip_is_seen_once_an_epoch_and_leftovers_begin_the_next(batch):
    """After e epochs of a bucket of n clips, it was in floor(e n / batch) batches: no clip is e + 1 times ahead."""
    source, one = clips(), loader(batch=batch)
    step, counts = 0, Counter()
    for epoch in range(1, 5):
        steps = sum(epoch * count // batch for count in COUNTS)
        while step < steps:
            counts.update(one.rows(step)[0])
            step += 1
        for shape, count in zip(SHAPES, COUNTS, strict=True):
            of_bucket = [counts[row] for row, own in enumerate(source.shapes) if own == shape]
            assert sum(of_bucket) == epoch * count // batch * batch
            assert max(of_bucket) - min(of_bucket) <= 1 and max(of_bucket) <= epoch


def test_the_order_of_buckets_and_rows_follows_the_seed():
    orders = [seen(loader(seed=seed), 18) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:9] != orders[0][9:]
    of_bucket = [[clips().shapes[rows[0]] for rows in order] for order in orders]
    assert of_bucket[0] != of_bucket[2] and of_bucket[0][:9] != sorted(of_bucket[0][:9])
    in_order = [row for rows in seen(loader(batch=1, shuffle=False), 38) for row in rows]
    assert in_order == [*range(19)] * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_draw_the_same_shape_in_a_step(ranks):
    whole = seen(loader(batch=4), 12)
    parts = [seen(loader(batch=4, mesh=Mesh(CPU, rank, ranks)), 12) for rank in range(ranks)]
    assert [sum(rows, ()) for rows in zip(*parts, strict=True)] == whole


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_goes_on_from_its_position(shuffle, grows):
    """Also through JSON, after a look ahead, where the batch grows, and where an earlier position comes back."""
    ramp = RampUpConfig(2, 2, 12) if grows else None
    whole = seen(loader(batch=4, shuffle=shuffle, ramp=ramp), 20)
    one = loader(batch=4, shuffle=shuffle, ramp=ramp)
    held = {}
    for step in range(12):
        assert one.rows(step)[0] == list(whole[step])
        one.rows(step + 3)
        held[step + 1] = json.dumps(dataclasses.asdict(one.position(step + 1)))
    for step in (12, 1, 7):
        other = loader(batch=4, shuffle=shuffle, ramp=ramp)
        for again in (other, one):
            again.go_on(Position(**json.loads(held[step])))
            assert seen(again, 20 - step, step) == whole[step:]


def test_a_run_that_goes_on_with_another_batch_leaves_no_clip_out():
    first, other, rows = loader(batch=4), loader(batch=3), []
    for step in range(5):
        rows += first.rows(step)[0]
    other.go_on(Position(**json.loads(json.dumps(dataclasses.asdict(first.position(5))))))
    for step in range(5, 40):
        rows += other.rows(step)[0]
    counts = Counter(rows)
    for shape in SHAPES:
        of_bucket = [counts[row] for row, own in enumerate(clips().shapes) if own == shape]
        assert max(of_bucket) - min(of_bucket) <= 1


def test_each_epoch_draws_one_caption_of_a_clip_and_all_texts_are_known_ahead():
    source = clips((4, 2, 0), captions=2)
    one = loader(source=source)
    rows = [row for rows in seen(one, 3) for row in rows]
    assert sorted(source.clip_of[row] for row in rows) == [*range(6)]
    for steps in (0, 1, 2, 9):
        texts = {source.prompts[row] for rows in seen(one, steps) for row in rows}
        assert texts <= {*one.prompts(steps)[1:]} and (steps == 9 or len(texts) == len(one.prompts(steps)) - 1)


def kind(first, other) -> ClipRows:
    return ClipRows(first, None, ClipRows(other))


@pytest.fixture
def stored(tmp_path):
    """Two files of two shapes each, in row groups of one shape and of both."""
    for name, shapes in (("a", [0, 0, 1, 1, 0, 1]), ("b", [1, 1, 1, 1, 0, 0])):
        latents = [torch.full(SHAPES[shape], float(i)) for i, shape in enumerate(shapes)]
        write_clips(tmp_path / f"{name}.parquet", latents, rows=2)
    return read_stored_files(tmp_path, kind(*SHAPES[:2]))


def test_files_of_several_shapes_are_one_set(stored):
    shapes = stored.shapes
    assert Counter(shapes) == {SHAPES[0]: 5, SHAPES[1]: 7}
    source = ParquetClips(stored, tiny_codec(), 2)
    source._uses_text = False
    plan, options = BatchPlan.one_update(2, 2), {"shapes": shapes}
    one = BucketLoader(source, tiny_codec(), plan, SHAPES[0], "", 0, ALONE, **options)
    counts = Counter()
    for step in range(12):
        batch = one.batch(step)
        assert {shapes[row] for row in batch.prompt_ids} == {batch.latent_shape}
        raw = tiny_codec().raw(batch.latents)[:, 0, 0, 0, 0].round().tolist()
        assert raw == [row % 6 for row in batch.prompt_ids]
        counts.update(batch.prompt_ids)
    assert {*counts.values()} == {2}  # 24 rows in two epochs of both buckets, in floor(2 n / 2) batches of each
    other = BucketLoader(source, tiny_codec(), plan, SHAPES[0], "", 0, ALONE, **options)
    other.go_on(Position(**json.loads(json.dumps(dataclasses.asdict(one.position(5))))))
    assert seen(other, 7, 5) == seen(one, 7, 5)
    one.close()


def test_rows_of_another_shape_and_pairs_of_two_shapes_are_refused(tmp_path, stored):
    with pytest.raises(
        UserError, match=r"a\.parquet: row 3 .* has latents \(16, 1, 4, 8\), .* make .* or \(16, 1, 8, 4\)"
    ):
        read_stored_files(tmp_path / "a.parquet", kind(SHAPES[0], SHAPES[2]))
    stored.check_rejected(stored)
    first, other = (read_stored_files(tmp_path / f"{name}.parquet", stored.kind) for name in "ab")
    with pytest.raises(UserError, match=r"b\.parquet: row 1 .* is not the pair of .*a\.parquet: row 1 .* one shape"):
        first.check_rejected(other)


def test_encoded_videos_have_the_latents_of_their_size_alone(tmp_path):
    for name, frames in (("a", grays(9, 32, 64)), ("b", grays(5, 64, 32)), ("c", grays(6, 32, 64))):
        write_exactly(tmp_path / f"{name}.mkv", frames, 8)
        (tmp_path / f"{name}.txt").write_text(f"clip {name}")
    codec, given = tiny_codec(), sizes(LONG, WIDE, TALL)
    source = encode_videos(tmp_path, codec, given, first_frames=True)
    for row, size in enumerate((given[0], given[2], given[1])):
        assert source.shapes[row] == codec.latent_shape(size.frames, size.height, size.width)
        assert source.request(row).images[0].pixels.shape == (size.height, size.width, 3)
    alone = encode_videos(tmp_path, codec, given[2])
    assert torch.equal(source.latents([1]), alone.latents([1]))
    (tmp_path / "d.txt").write_text("short")
    write_exactly(tmp_path / "d.mkv", grays(3, 32, 64), 8)
    with pytest.raises(UserError, match=r"d\.mkv: too short: 3 frames"):
        encode_videos(tmp_path, codec, given)
