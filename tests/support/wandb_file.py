"""What Weights & Biases wrote offline: records of its files, which have LevelDB's log format."""

import json
import struct
from pathlib import Path

BLOCK, HEAD, ENDS = 2**15, 7, (1, 4)  # kinds of a chunk that ends a record: the whole of one, or its last part


def history(run: Path) -> list[dict]:
    """The rows of all offline folders of a run directory, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for content in _records(file.read_bytes()):
            record = Record.FromString(content)
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def _records(data: bytes) -> list[bytes]:
    assert data[:4] == b":W&B"
    at, record, records = HEAD, b"", []
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEAD])
        record += data[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in ENDS:
            records.append(record)
            record = b""
    return records
