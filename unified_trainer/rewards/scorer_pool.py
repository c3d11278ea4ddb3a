"""A pool of processes that score on CPU cores, beside the process that makes samples."""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import torch

from unified_trainer.basics.errors import UnscoredError, UserError
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.rewards.base import ScorerConfig, ScorerKind, of_images, or_unscored
from unified_trainer.rewards.scorer_process import ScorerProcess

MOST = 8  # processes of a scorer by default; one of ocr takes 0.6 GB


def processes_of(config: ScorerConfig, kind: ScorerKind, ranks: int = 0) -> int:
    """Return how many processes score for a rank; `ranks` are those on its machine, 0 for what the launcher says."""
    if config.processes is not None or not kind.cpu_seconds:
        return config.processes or 0
    ranks = ranks or int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return max(1, min(MOST, len(os.sched_getaffinity(0)) // ranks - 1))


def in_pool(kind: ScorerKind, config: ScorerConfig, key: str, timeout: float) -> ScorerKind:
    """Return a kind as it scores in the processes that its settings ask for, or as it is without any."""
    count = processes_of(config, kind)
    load = partial(ScorerPool, kind, count, key, timeout)
    return replace(kind, load=load, own_timeout=True, apart=True) if count else kind


class ScorerPool:
    """Scores each video for itself, or each frame for a kind that says its cost, in one of several processes."""

    def __init__(
        self, kind: ScorerKind, count: int, key: str, timeout: float, config: ScorerConfig, device: torch.device
    ) -> None:
        """Start the processes, which load the scorer; raise what `ScorerProcess` does."""
        place = device if config.python else torch.device("cpu")
        program, self._key, self._per_frame = replace(config, kind=kind.program), key, kind.cpu_seconds > 0
        self._threads, self._idle = ThreadPoolExecutor(count, "scorers"), SimpleQueue[ScorerProcess]()
        self._processes = [*self._threads.map(lambda _: ScorerProcess(program, place, key, timeout), range(count))]
        for process in self._processes:
            self._idle.put(process)
        self._of_frames = of_images(lambda x, of: self._rows(x[:, :, None], of), sys.maxsize, config.top_fraction)

    def __call__(self, video: Video, prompts: Sequence[str]) -> PerSample:
        """Wait for all scores; raise what `ScorerProcess` does, and UserError where a gradient is needed."""
        if video.requires_grad and not self._per_frame:
            raise UserError(f"{self._key}.processes: other processes give no gradient: leave it out")
        return (self._of_frames if self._per_frame else self._rows)(video.detach().cpu(), prompts)

    def close(self) -> None:
        """End the processes, also in the middle of a call."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.end()

    def _rows(self, video: Video, prompts: Sequence[str]) -> PerSample:
        rows = [self._threads.submit(self._row, *row) for row in zip(video.split(1), prompts, strict=True)]
        try:
            return or_unscored([row.result() for row in rows], video.device)
        finally:  # after a failure too
            for row in rows:
                row.cancel()

    def _row(self, video: Video, prompt: str) -> float | str:
        """Return the score of a video, or why it has none."""
        process = self._idle.get()
        try:
            return float(process(video, (prompt,)))
        except UnscoredError as error:
            return str(error)
        finally:
            self._idle.put(process)
