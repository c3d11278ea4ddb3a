"""Files that a user gives: read up to a bound on their size, and checked against a declared schema.

Every fault is a UserError of one line that names the file and the field, line or byte.
"""

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from unified_trainer.basics.errors import MissingFileError, UserError

try:
    from yaml import CSafeLoader as YamlLoader  # libyaml, seven times as fast, where PyYAML has it
except ImportError:
    from yaml import SafeLoader as YamlLoader

JSON_MIB, YAML_MIB = 64, 1  # a tokenizer.json of 256,000 tokens has about 17 MiB, a config.yaml a few KiB
YAML_VALUES = 10_000  # keys and values of a YAML file with every alias written out
SHOWN = 60  # characters of a wrong value that a message repeats
BYTE_ORDER_MARK = "\ufeff"
PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str")}
NUMBERS, DIGITS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"), 100
TEXT, MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
S = TypeVar("S", bound="Schema")


class Schema(BaseModel):
    """The fields of a JSON object that the trainer depends on; others are allowed. Types are not converted."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="ignore")


def is_weights(file: Path) -> bool:
    """Return whether a file is read as weights, by its name; hidden ones are of a file browser or a file system."""
    return file.suffix == ".safetensors" and not file.name.startswith(".")


def check_file(file: Path, key: str = "") -> None:
    """Raise UserError unless there is a regular file; `key` is the setting that names it, for messages."""
    place = _place(file, key)
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        if link := next((path for path in (file, *file.parents) if path.is_symlink() and not path.exists()), None):
            raise MissingFileError(
                f"{place}: {link} is a link to {link.readlink()}, which is not there; fetch it again"
            ) from error
        raise MissingFileError(f"{place}: no such file" if key else f"{place} is missing") from error
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{place!r} is no path: it holds a NUL") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device or pipe"
        raise MissingFileError(f"{place}: it is {kind}, not a file")


def read_text(file: Path, key: str = "", mib: int | None = None) -> str:
    """Read a UTF-8 text, of at most `mib` MiB, without a byte order mark; line ends stay as they are."""
    return _decoded(file, key, mib).removeprefix(BYTE_ORDER_MARK)


def _decoded(file: Path, key: str, mib: int | None) -> str:
    check_file(file, key)
    place = _place(file, key)
    try:
        if mib is not None and file.stat().st_size > mib * 2**20:
            raise UserError(f"{place} has {file.stat().st_size / 2**20:.1f} MiB; such files have at most {mib} MiB")
        return decoded(file.read_bytes(), place)
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror}") from error


def decoded(data: bytes, place: str) -> str:
    """Return the text that UTF-8 bytes hold; raise UserError, which begins with `place`, for others."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{place} is not UTF-8: byte {error.start + 1}, in line {line}, is 0x{data[error.start]:02x}; save it as "
            "UTF-8"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; raise UserError, naming the file, if it is missing, unreadable or something else."""
    text = _decoded(file, "", JSON_MIB)
    if text.startswith(BYTE_ORDER_MARK):
        raise UserError(f"{file} begins with a byte order mark, which other programs refuse: save it without")
    return parse_object(text, str(file), "fetch or write it again")


def read_json_rows(file: Path, key: str, name: str, endings: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Read the objects of a JSON list, or of the list `data` of a JSON object; a text t stands for {name: t}.

    An object whose keys all end in `endings` holds a caption, a list of captions or a row for each path.
    Raise UserError, naming the file and the entry, for anything else.
    """
    place = _place(file, key)
    content = _parsed(read_text(file, key, JSON_MIB), place)
    if endings and isinstance(content, dict) and all(path.lower().endswith(endings) for path in content):
        of = {path: value if isinstance(value, dict) else {"caption": value} for path, value in content.items()}
        return [{"path": path, **row} for path, row in of.items()]
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise UserError(f"{place} must hold a JSON list, or an object whose data is a list, not {_kind(content)}")
    rows = [{name: row} if isinstance(row, str) else row for row in rows]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{place}: entry {number} must be a text or an object, not {_kind(row)}")
    return rows


def parse_object(text: str, place: str, way_out: str = "") -> dict[str, Any]:
    """Return the JSON object that a text holds; raise UserError, which begins with `place`, for anything else."""
    content = _parsed(text, place, way_out)
    if not isinstance(content, dict):
        raise UserError(f"{place} must hold a JSON object, not {_kind(content)}")
    return content


def _parsed(text: str, place: str, way_out: str = "") -> Any:
    end = f"; {way_out}" if way_out else ""
    if not text.strip():
        raise UserError(f"{place} is empty, and no JSON{end}")
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{place} is not JSON ({error}){end}") from error
    except RecursionError as error:
        raise UserError(f"{place} is nested too deeply{end}") from error


def read_as(schema: type[S], file: Path) -> S:
    """Read a JSON object and check it; raise UserError, naming file and field, for a value that cannot be."""
    return checked(schema, read_json(file), str(file))


def checked(schema: type[S], content: Mapping[str, Any], place: str) -> S:
    """Return the declared fields of an object; raise UserError, which begins with `place`, for the first wrong one."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{place}: {_fault(error)}") from error


def declared(schema: type[Schema], file: Path) -> dict[str, Any]:
    """Return those fields of a JSON object that a schema declares, checked as `read_as` does."""
    return read_as(schema, file).model_dump(by_alias=True, exclude_unset=True)


def read_yaml(file: Path, key: str = "") -> dict[str, Any]:
    """Read a YAML mapping of plain values; raise UserError, naming file and line, for anything else.

    Texts, numbers, true, false and null are plain; dates and objects are not. The size counts with every alias written
    out, so that a small file cannot fill the memory.
    """
    place = _place(file, key)
    text = read_text(file, key, YAML_MIB)
    loader = YamlLoader("")
    try:
        loader = YamlLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise UserError(f"{place} is empty; expected keys and values")
        if _values(root, place, {}) > YAML_VALUES:
            raise UserError(f"{place} has more than {YAML_VALUES} keys and values with its aliases written out")
        content = loader.construct_document(root)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, KeyError) as error:  # KeyError: a value that its own tag says to be a bool
        raise UserError(f"{place} is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(f"{place} is nested too deeply") from error
    finally:
        loader.dispose()
    if not isinstance(content, dict):
        raise UserError(f"{place} must hold keys and values, not {_kind(content)}")
    return content


def _values(node: yaml.Node, place: str, known: dict[int, int | None]) -> int:
    """Count a node and what is in it; `known` holds the counts of nodes seen before, None for those around this one."""
    where = f"{place}, line {node.start_mark.line + 1}"
    if id(node) in known:
        if (count := known[id(node)]) is None:
            raise UserError(f"{where}: an alias refers to what it is in")
        return count
    known[id(node)] = None
    count = 1
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for name, value in node.value:
            at = f"{place}, line {name.start_mark.line + 1}"
            if not isinstance(name, yaml.ScalarNode) or name.tag not in (TEXT, MERGE):
                raise UserError(f"{at}: the key {_short(name.value)} is no text; put it in quotes")
            if name.value in names and name.tag != MERGE:
                raise UserError(f"{at}: the key {name.value} stands there twice")
            names.add(name.value)
            count += 1 + _values(value, place, known)
    elif isinstance(node, yaml.SequenceNode):
        count += sum(_values(value, place, known) for value in node.value)
    elif node.tag in NUMBERS and (len(node.value) > DIGITS or not node.value.strip()):
        raise UserError(f"{where}: {_short(node.value)} is no number of at most {DIGITS} characters")
    elif node.tag not in PLAIN:
        kind = node.tag.rpartition(":")[2]
        raise UserError(f"{where}: {_short(node.value)} is a {kind}; expected a text, which quotes make of it")
    known[id(node)] = count
    return count


def _fault(error: ValidationError) -> str:
    """Say what is wrong with the first wrong field; of a field with several types, with the type that fits furthest."""
    errors = error.errors()
    same = [fault for fault in errors if fault["loc"][:1] == errors[0]["loc"][:1]]
    first = max(same, key=lambda fault: len(fault["loc"])) if any(map(_names_type, errors[0]["loc"])) else errors[0]
    field = ".".join(str(part) for part in first["loc"] if not _names_type(part))
    if first["type"] == "missing":
        return f"{field} is missing"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    text = first["msg"].removeprefix("Input ").replace("should", "must", 1)
    return f"{field} {text[:1].lower()}{text[1:]}, not {_short(first['input'])}"


def _names_type(part: str | int) -> bool:
    """Return whether a part of a location is one of several types, and not a field."""
    return isinstance(part, str) and ("[" in part or part.startswith("constrained-"))


def _place(file: Path, key: str) -> str:
    return f"{key} {file}".strip()


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
