"""Curves in the terminal: their numbers, and a terminal that is as it was after a run that Ctrl-C ended."""

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from helpers import SMALL
from rich.console import Console

from unified_trainer.config import TrackingConfig
from unified_trainer.tracking.live_curves import BRAILLE, DOTS, ROWS, LiveCurves, chart, curve
from unified_trainer.tracking.tracker import Tracker

SECONDS = 240  # that the program may take to start and to stop on a busy machine


def points_of(lines: list[str]) -> dict[int, list[int]]:
    """Return the rows of the dots of braille characters by column, from the top."""
    found: dict[int, list[int]] = {}
    for i, line in enumerate(lines):
        for k, letter in enumerate(line):
            for column in (0, 1):
                rows = [4 * i + row for row in range(4) if (ord(letter) - BRAILLE) & DOTS[column][row]]
                found.setdefault(2 * k + column, []).extend(rows)
    return found


def test_a_curve_goes_through_its_values():
    """20 values 0..19 on 10 characters: value i is in column i, and 19 - i of 19 parts of the height from the top."""
    values = [float(i) for i in range(20)]
    found = points_of(curve(values, 10, 0.0, 19.0))
    tall = 4 * ROWS - 1
    assert all(round((19 - i) / 19 * tall) in found[i] for i in range(20))
    assert found[0][-1] == tall and found[19][0] == 0
    flat = points_of(curve([3.0, 3.0], 4, 3.0, 3.0))
    assert set(flat) == set(range(8)) and all(rows == [2 * ROWS] for rows in flat.values())


def test_a_chart_names_its_largest_least_and_last_value_and_its_steps():
    lines = chart("reward", [3, 4, 9], [2.0, -1.0, 0.25], 40)
    assert lines[0].split() == ["reward", "0.25"] and lines[-1].split() == ["3", "9"]
    assert lines[1].split()[0] == "2" and lines[-2].split()[0] == "-1" and len(lines) == ROWS + 2
    assert {len(line) for line in lines[:-1]} <= {39, 40}


@pytest.mark.parametrize(
    ("width", "height", "charts"), [(80, 24, 4), (80, 14, 2), (200, 14, 4), (30, 14, 1), (80, 8, 0)]
)
def test_as_many_charts_as_the_terminal_has_room_for(width, height, charts):
    curves = LiveCurves({name: name for name in ("a", "b", "c", "d", "e")})
    for step in range(1, 300):
        curves.add(step, {name: 1.0 / step for name in "abcde"} | {"f": 1.0})
    curves.add(300, {"a": float("nan")})
    screen = Console(width=width, height=height, record=True, file=io.StringIO(), force_terminal=True)
    screen.print(curves)
    shown = screen.export_text()
    assert len(re.findall(r"\b[a-f] 0\.003344", shown)) == charts and "nan" not in shown
    assert all(len(line) <= width for line in shown.splitlines())


def test_without_a_terminal_a_line_says_so_and_lines_go_on(tmp_path, capsys):
    with Tracker(tmp_path, TrackingConfig(), {}, 2, 0, True, live=True) as tracker:
        tracker.log(1, {"train/loss": 2.0}, advance=True)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "--live draws curves in a terminal only: the output is none" and "loss 2" in second
    with Tracker(tmp_path, TrackingConfig(), {}, 2, 0, False, live=True) as tracker:  # another rank
        tracker.log(1, {"train/loss": 2.0}, advance=True)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_ctrl_c_leaves_the_terminal_as_it_was(run_folder):
    """A run in a pseudo-terminal of 100 x 30: curves of its metrics, whole messages, and the modes it had before."""
    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    before = termios.tcgetattr(end)
    words = [*SMALL["finetune"], "--live", "--steps", "100000", "--checkpoint-every", "0", "--output", str(run_folder)]
    child = subprocess.Popen(
        [sys.executable, "-m", "unified_trainer", *words],
        stdin=end,
        stdout=end,
        stderr=end,
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),  # Ctrl-C reaches the process
        env={**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"},
    )
    said, asked, until = b"", False, time.monotonic() + SECONDS
    while time.monotonic() < until and (child.poll() is None or select.select([main], [], [], 0)[0]):
        if select.select([main], [], [], 0.1)[0]:
            said += os.read(main, 1 << 16)
        if not asked and re.search(r"loss \d.*[⠁-⣿]".encode(), said, re.S) and len(lines_of(run_folder)) > 5:
            os.write(main, b"\x03")
            asked = True
    after = termios.tcgetattr(end)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    assert child.wait(10) == 0 and asked, text[-2000:]
    assert after == before and said.count(b"\x1b[?25l") == said.count(b"\x1b[?25h") > 0  # hidden and shown again
    rows = lines_of(run_folder)
    losses = [row["train/loss"] for row in rows]
    frame = text[text.rindex("loss ") - 200 :]
    assert f" loss {losses[-1]:.4g} " in text and re.search(r"loss \S+\s", frame)
    labels = re.findall(r"^ *(\S+) [⠀-⣿]{10}", text, re.M)
    assert f"{max(losses):.4g}" in labels and f"{min(losses):.4g}" in labels
    assert f"--resume {run_folder}" in text.replace("\r\n", "") and f"{rows[-1]['step']}/100000" in text


def lines_of(run) -> list[dict]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
