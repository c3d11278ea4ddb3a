"""The types that columns of FastVideo's parquet files must have, known from a file's footer."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from unified_trainer.basics.errors import UserError
from unified_trainer.data.fastvideo import T2V
from unified_trainer.data.tables import is_text

LIKE = {"bytes": "vae_latent_bytes", "shape": "vae_latent_shape", "dtype": "vae_latent_dtype"}  # by a name's last word


def check_types(file: Path, schema: pa.Schema, names: Iterable[str]) -> None:
    """Raise UserError for a column of another type than FastVideo's; texts and bytes may be large or dictionaries.

    The three columns of each tensor have the types of those of vae_latent.
    """
    for name in names:
        if name in schema.names:
            if schema.names.count(name) > 1:
                raise UserError(f"data.path: {file} has several columns {name}")
            own, expected = schema.field(name).type, T2V.field(LIKE.get(name.rpartition("_")[2], name)).type
            if not (own == expected or _alike(own, expected)):
                raise UserError(f"data.path: {file}: column {name} holds {own}, expected {expected}")


def check_no_nulls(file: Path, metadata: pq.FileMetaData, name: str) -> None:
    """Raise UserError for a column with nulls, as far as the footer tells."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in (group.column(i) for i in range(group.num_columns)):
            statistics = column.statistics if column.path_in_schema == name else None
            if statistics is not None and statistics.has_null_count and statistics.null_count:
                raise UserError(
                    f"data.path: {file}: row group {number + 1}: {name} is null in {statistics.null_count} rows"
                )


def _alike(own: pa.DataType, expected: pa.DataType) -> bool:
    kinds = pa.types
    if kinds.is_string(expected):
        return is_text(own)
    if kinds.is_binary(expected):
        return bool(kinds.is_large_binary(own) or kinds.is_binary_view(own))
    is_list = kinds.is_list(own) or kinds.is_large_list(own) or kinds.is_fixed_size_list(own)
    return bool(is_list and kinds.is_integer(own.value_type))
