"""Many lines of a metrics.jsonl, read by Arrow."""

import io
from array import array

import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import json as arrow_json

COUNTED = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)  # types of columns that are metrics


def metrics_in(whole: bytes) -> list[tuple[str, array, array]] | None:
    """Return every metric with its steps and values; None for what Arrow does not read so.

    That is NaN, for example, or a line without a step.
    """
    try:
        table = arrow_json.read_json(io.BytesIO(whole), arrow_json.ReadOptions(block_size=len(whole)))
    except pa.ArrowException:
        return None
    step = table.column("step") if "step" in table.column_names else None
    if step is None or not pa.types.is_integer(step.type) or step.null_count or table.num_rows != whole.count(b"\n"):
        return None
    if table.num_rows and not 0 <= pc.min(step).as_py() <= pc.max(step).as_py() < 2**53:
        return None
    steps, curves = step.to_numpy(), []
    for name in table.column_names:
        column = table.column(name)
        if name == "step" or not any(is_kind(column.type) for is_kind in COUNTED):
            continue
        there = column.is_valid().to_numpy()
        values = column.drop_null().cast(pa.float64()).to_numpy()
        curves.append((name, array("q", steps[there].tobytes()), array("d", values.tobytes())))
    return curves
