"""The command report: it writes one HTML page of one or several runs."""

from pathlib import Path
from typing import Annotated

import tyro

from unified_trainer.basics.ranges import NonNegative
from unified_trainer.basics.terminal import say
from unified_trainer.tools.report.page import MEGABYTE, VIDEO_MEGABYTES, write_report
from unified_trainer.tools.report.videos import VideoFormat


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path = Path("report.html"),
    video: VideoFormat = "mp4",
    video_megabytes: NonNegative = VIDEO_MEGABYTES,
) -> None:
    """Write one HTML file of runs that a browser opens from disk: curves, samples over training, settings.

    Several runs are compared: curves over each other, samples in columns, last metrics with their spread over seeds.

    Args:
        runs: Run directories; a run may still go on.
        out: File to write; a report that is there already is replaced.
        video: Format of the videos: mp4 as the runs wrote them (H.264), or webm (VP9) for browsers without H.264.
        video_megabytes: Megabytes of videos in the page; 0 leaves out all, else validations in the middle are left out.
    """
    written = write_report(runs, out, video, video_megabytes)
    line = f"{out}: {written.size / MEGABYTE:.1f} MB, {written.videos} videos"
    if written.left_out:
        line += f"; {written.left_out} more did not fit into --video-megabytes {video_megabytes:g}"
    for fault in written.unreadable:
        say(f"warning: {fault}")
    say(line)
