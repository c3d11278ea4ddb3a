"""Rows encoded by FastVideo's preprocessing, or ours, read row group by row group on a thread ahead of training."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Condition, Trajectory, of_kind
from unified_trainer.data.fastvideo import read_tensor, text_columns
from unified_trainer.data.parquet_files import StoredFiles
from unified_trainer.data.row_kinds import TrajectoryRows
from unified_trainer.models.base import Codec, ImageEncoder, Prompt
from unified_trainer.parallel.mesh import Mesh

SAMPLES = 4  # files of one text encoder whose first embedding is compared with the run's
TOLERANCE = 0.05  # norm of the difference over the norm; bf16 instead of fp32 makes about 0.01


class Rows(NamedTuple):
    """Some rows on the CPU: the values that their kind reads, and tensors of prompts."""

    values: Float[Tensor, "b ..."]  # one `RowKind.value` for each row
    text: Sequence[Prompt]  # of the captions; none if they are not used
    images: dict[str, Tensor]  # what was encoded of the condition images, by the names of a condition


class ParquetRows:
    """A source of captions with stored tensors and, where the run's text encoder made them, text embeddings.

    Files are read by one thread of its own, which keeps the row groups of the rows that were read last.

    Embeddings are used if the files name the run's text encoder (see `Codec.text_fingerprint`). Files of FastVideo name
    none: then the first row of up to four files is compared with what the run's text encoder makes of its caption. If
    one differs by more than 5%, all captions are encoded instead, once, as prompts are.
    """

    def __init__(self, files: StoredFiles, codec: Codec, lanes: int) -> None:
        """`lanes` is the number of row groups that a batch is read from."""
        self._files, self._codec, self.lanes = files, codec, lanes
        self.row_groups, self.shapes = [group.rows for group in files.row_groups], files.shapes
        self._thread = ThreadPoolExecutor(1, "clips")
        self._recent = deque[list[int]](maxlen=files.kind.shapes)  # the row groups of batches
        self._tables: dict[int, pa.Table] = {}  # of the row groups that are kept; only the thread looks at them
        self._asked: tuple[list[int], Future[Rows]] | None = None  # the rows that were asked for last
        self._text = text_columns(codec.text_shapes)
        other = ", ".join(sorted(files.text ^ {*chain(*self._text.values())}))
        self._text_fault = files.text_fault or (other and f"files and text encoder do not share {other}")
        self._compared = [] if self._text_fault else _rows_to_compare(files, codec.text_fingerprint)
        self._uses_text = None if self._compared else not self._text_fault  # None: not compared yet

    def __len__(self) -> int:
        return len(self._files.captions)

    def request(self, index: int) -> Request:
        """Return the caption of a row, and its actions."""
        return Request(self._files.captions[index], actions=self._files.actions[index])

    def latents(self, indices: list[int]) -> Float[Tensor, "b c t h w"] | None:
        """Return the clean, normalised latents of these rows, or None for files without clips."""
        return None

    def trajectory(self, indices: list[int]) -> Trajectory | None:
        """Return the teacher's trajectories of these rows, or None for files without any."""
        return None

    def condition(self, indices: list[int]) -> Condition | None:
        """Return the conditions of the text embeddings in the files, or None if captions are to be encoded."""
        return self._codec.text_condition(self._ask(indices).result().text) if self._uses_text else None

    def prefetch(self, indices: list[int]) -> None:
        """Begin to read these rows; what goes wrong is raised when they are asked for."""
        self._ask(indices)

    def to_encode(self, rows: Sequence[int]) -> list[int]:
        """Return the rows whose captions the text encoder must encode, if training draws these rows."""
        if self._uses_text is None:
            return self._compared
        return [] if self._uses_text else list(rows)

    def check_text(self, mesh: Mesh) -> str:
        """Decide whether the text embeddings of the files are used, and return it in words; a collective.

        The captions of `to_encode` should have been encoded before.
        """
        said = "the run's text encoder made them"
        if self._uses_text is None:
            text = self._ask(self._compared).result().text
            prompts = [self._files.captions[row] for row in self._compared]
            differences = [self._codec.text_difference(*pair) for pair in zip(prompts, text, strict=True)]
            worst = max(range(len(text)), key=differences.__getitem__)
            said = f"{len(text)} compared, which differ from the run's text encoder by at most {differences[worst]:.2%}"
            self._uses_text = not mesh.any(not differences[worst] <= TOLERANCE)
            if not self._uses_text:
                place = self._files.place(self._compared[worst])
                said = f"that of {place} differs from the run's text encoder by {differences[worst]:.0%}"
        said = self._text_fault or said
        return f"text embeddings of data.path: {'used' if self._uses_text else 'captions are encoded instead'}; {said}"

    def close(self) -> None:
        """End the thread, after the row group that it is reading."""
        self._thread.shutdown(cancel_futures=True)

    def values(self, indices: list[int]) -> Float[Tensor, "b ..."]:
        """Return what the files' kind reads of these rows; UserError names file and row of one that is damaged."""
        return self._ask(indices).result().values

    def _ask(self, indices: list[int]) -> Future[Rows]:
        if self._asked is None or self._asked[0] != indices:
            self._asked = (list(indices), self._thread.submit(self._read, indices))
        return self._asked[1]

    def _read(self, indices: Sequence[int]) -> Rows:
        """Read rows; the thread runs it."""
        text = {} if self._uses_text is False else self._text
        places = [self._files.locate(row) for row in indices]
        self._recent.append([*dict.fromkeys(group for group, _ in places)])
        self._tables = {group: self._tables[group] for group in chain(*self._recent) if group in self._tables}
        for group in self._recent[-1]:
            if group not in self._tables:
                self._tables[group] = self._read_row_group(group, [*chain(*text.values())])
        rows = [(row, self._tables[group], within) for row, (group, within) in zip(indices, places, strict=True)]
        values = torch.stack([self._value(*row) for row in rows])
        images = {
            name: torch.stack([self._tensor(*row, columns) for row in rows])
            for name, columns in self._files.kind.images.items()
        }
        prompts = [{name: self._tensor(*row, columns) for name, columns in text.items()} for row in rows]
        return Rows(values, prompts, images)

    def _read_row_group(self, number: int, text: Sequence[str]) -> pa.Table:
        group = self._files.row_groups[number]
        metadata = self._files.metadata[group.file]  # is not read again
        held = metadata.schema.to_arrow_schema().names
        columns = [name for name in (*self._files.kind.tensors, *text) if name in held]
        try:
            with pq.ParquetFile(group.file, metadata=metadata, page_checksum_verification=True) as opened:
                return opened.read_row_group(group.number, columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"data.path: {group.file} is damaged in row group {group.number + 1} ({error})") from error

    def _value(self, row: int, table: pa.Table, within: int) -> Tensor:
        return self._files.kind.value(partial(self._tensor, row, table, within), table.column_names)

    def _tensor(self, row: int, table: pa.Table, within: int, columns: Sequence[str]) -> Tensor:
        data, shape, dtype = (table[name][within] for name in columns)
        place = f"data.path: {self._files.place(row)}"
        return read_tensor(place, columns[0], data.as_buffer(), shape.as_py(), dtype.as_py())


class ParquetClips(ParquetRows):
    """A source of captions with clean latents."""

    def latents(self, indices: list[int]) -> Float[Tensor, "b c t h w"]:
        return self._codec.normalise(self.values(indices))


class ParquetFirstFrames(ParquetClips):
    """A source of clips that condition on their first frame, which the latents or columns of kind i2v hold."""

    def condition(self, indices: list[int]) -> Condition:
        codec = self._codec
        assert isinstance(codec, ImageEncoder)  # the check of the run refuses other families
        text = super().condition(indices)
        if text is None:
            text = codec.encode_text([self._files.captions[row] for row in indices])
        if images := self._ask(indices).result().images:
            device = next(iter(text.tensors.values())).device
            return text.updated(Condition(images).map(lambda x: x.to(device)))
        return text.updated(codec.first_frames(self.latents(indices)))


class ParquetPairs(ParquetClips):
    """A source of captions with clean latents, and with those of clips that are preferred less, from other files."""

    def __init__(self, files: StoredFiles, rejected: StoredFiles, codec: Codec, lanes: int) -> None:
        super().__init__(files, codec, lanes)
        self._rejected = ParquetClips(rejected, codec, lanes)

    def rejected(self, indices: list[int]) -> Float[Tensor, "b c t h w"]:
        """Return the clean, normalised latents of the clips that are preferred less."""
        return self._rejected.latents(indices)

    def prefetch(self, indices: list[int]) -> None:
        super().prefetch(indices)
        self._rejected.prefetch(indices)

    def close(self) -> None:
        super().close()
        self._rejected.close()


class ParquetTrajectories(ParquetRows):
    """A source of captions with states of a teacher's ODE at the noise levels `levels`."""

    def trajectory(self, indices: list[int]) -> Trajectory:
        values = self.values(indices)
        levels = of_kind(TrajectoryRows, self._files.kind).levels
        return Trajectory(levels, values[:, :-1], values[:, -1])


def _rows_to_compare(files: StoredFiles, fingerprint: str) -> list[int]:
    """Return the first rows of files that name no or another text encoder: up to SAMPLES for each encoder they name."""
    unknown = [rows for encoder, rows in files.first_rows().items() if encoder != fingerprint]
    return [row for rows in unknown for row in rows[:: -(-len(rows) // SAMPLES)]]
