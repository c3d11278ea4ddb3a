"""A folder of FastVideo parquet files that is written over several calls of preprocess.

preprocess.json              what the rows depend on: sizes, encoders
clips-00000.parquet          rows in the order of the videos or prompts
negative_prompt.safetensors  see data/negative_prompt.py
skipped.jsonl                videos that could not be used, and why
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from unified_trainer.basics.errors import UserError
from unified_trainer.tools.output_folder import write_text
from unified_trainer.tools.progress import ItemProgress

WHAT = "encoded clips"
ABOUT = "preprocess.json"
SKIPPED = "skipped.jsonl"
PLURALS = {"clip": "clips", "prompt": "prompts", "trajectory": "trajectories"}
GROUP_BYTES = 8 * 2**20  # of a row group at most, where a row is smaller
GROUPS = 8  # of a file at least, where it has as many rows


class ClipFolder:
    """The parquet files of a folder: what they hold, and rows that are added to them."""

    def __init__(self, folder: Path, schema: pa.Schema, rows_per_file: int) -> None:
        self._folder, self._schema, self._rows_per_file = folder, schema, rows_per_file
        for building in folder.glob("*.tmp"):  # of a process that was killed
            building.unlink()
        self._writer: pq.ParquetWriter | None = None
        self._groups: dict[str, list[Mapping[str, object]]] = {}  # by the shape of their latents
        self._rows = 0  # of the file that is being written

    def captions(self) -> dict[str, str]:
        """Return the captions of the rows in finished files, by id; UserError names a file that cannot be read."""
        by_id: dict[str, str] = {}
        for file in self._files():
            try:
                rows = pq.read_table(file, columns=["id", "caption"])
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{file} is damaged ({error}): remove it, and its rows are made again") from error
            by_id |= zip(rows["id"].to_pylist(), rows["caption"].to_pylist(), strict=True)
        return by_id

    def add(self, row: Mapping[str, object]) -> Path | None:
        """Add a row; return the file if it was its last one, which is then complete under its name."""
        group = self._groups.setdefault(shape := str(row.get("vae_latent_shape")), [])
        group.append(row)
        self._rows += 1
        size = sum(len(value) for value in row.values() if isinstance(value, bytes))
        if len(group) >= max(1, min(self._rows_per_file // GROUPS, GROUP_BYTES // size)):
            self._write_group(shape)
        return self.finish() if self._rows == self._rows_per_file else None

    def finish(self) -> Path | None:
        """Complete the file that is being written; return it, or None if there is none."""
        for shape in [*self._groups]:
            self._write_group(shape)
        if self._writer is None:
            return None
        building, file = self._building, self._folder / f"clips-{self._next():05}.parquet"
        try:
            self._writer.close()
            with building.open("rb+") as opened:
                os.fsync(opened.fileno())
            building.replace(file)
        except OSError as error:
            raise UserError(f"{file} cannot be written ({error}): free space, and call again") from error
        finally:
            self._writer, self._rows = None, 0
        return file

    def write_skipped(self, reasons: Mapping[str, str]) -> None:
        """Write the videos that were skipped; remove the list of an earlier call if there are none."""
        file = self._folder / SKIPPED
        if not reasons:
            file.unlink(missing_ok=True)
            return
        lines = (json.dumps({"file": name, "reason": reason}) + "\n" for name, reason in reasons.items())
        write_text(file, "".join(lines))

    @property
    def _building(self) -> Path:
        return self._folder / "clips.parquet.tmp"

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("clips-*.parquet"))

    def _next(self) -> int:
        """Return the number of the next file."""
        files = self._files()
        return int(files[-1].stem.removeprefix("clips-")) + 1 if files else 0

    def _write_group(self, shape: str) -> None:
        group = self._groups.pop(shape)
        try:
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._building, self._schema, compression="zstd")
            self._writer.write_table(pa.Table.from_pylist(group, schema=self._schema), row_group_size=len(group))
        except OSError as error:
            self._writer, self._rows = None, 0
            raise UserError(f"{self._building} cannot be written ({error}): free space, and call again") from error


def is_empty(folder: Path) -> bool:
    """Return whether a folder holds no file of rows, as after a call that was refused: any settings then fit it."""
    return not any(folder.glob("clips-*.parquet"))


def add_row(written: ClipFolder, row: Mapping[str, object], progress: ItemProgress) -> None:
    """Add a row, count it, and say which file it completes."""
    complete = written.add(row)
    progress.advance()
    if complete:
        progress.note(f"{complete.name} is complete")


def summarise(progress: ItemProgress, rows: int, kind: str, out: Path, new: int, before: str = "") -> None:
    """Say how many rows, each a `kind`, the folder holds at the end of a call, and the speed of it, after `before`.

    The speed counts videos that were skipped too.
    """
    kinds = PLURALS[kind]
    speed = f", {progress.rate:.3g} {kinds} per second" if new else ""
    progress.say(f"{before}{rows} {kind if rows == 1 else kinds} in {out}, {new} of them new{speed}")
