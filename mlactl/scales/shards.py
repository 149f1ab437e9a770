"""Which files a checkpoint is: one safetensors file, a folder, or an index with its shards."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mlactl.errors import CannotRun, UsageError
from mlactl.scales.files import read_bytes, unreadable
from mlactl.scales.findings import Findings, plain
from mlactl.scales.outer import report_duplicate, report_mark
from mlactl.scales.strict_json import MalformedJson, decode, read_object, read_value, shown

INDEX_SUFFIX = ".safetensors.index.json"
_SHARD_NAME = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.safetensors$")


@dataclass(frozen=True, slots=True)
class Shards:
    """Files to read. `weight_map` is the index's tensor -> shard file name; `partial`: not every shard is there."""

    path: Path
    files: tuple[Path, ...]
    weight_map: dict[str, str] | None
    partial: bool


def is_checkpoint(path: Path, first: bytes) -> bool:
    """Whether a path is a checkpoint's by name: a folder, *.safetensors or its index (and not an outer-scale file)."""
    from mlactl.scales.header import looks_like_header

    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        return True
    return not path.name.endswith(".json") and looks_like_header(first)


def find(path: Path, findings: Findings) -> Shards:
    """The files behind a path; what the index has against them is added to `findings`. Raises CannotRun, UsageError."""
    if path.is_dir():
        return _of_folder(path, findings)
    if path.name.endswith(".json"):
        return _of_index(path, path, findings)
    numbered = _SHARD_NAME.match(path.name)
    return Shards(path, (path,), None, numbered is not None and int(numbered[3]) > 1)


def _of_folder(folder: Path, findings: Findings) -> Shards:
    try:
        names = sorted(item.name for item in folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indexes) > 1:
        raise UsageError(f"{plain(folder)}: {len(indexes)} index files ({', '.join(map(plain, indexes))})", hint="name the one to verify")
    if indexes:
        return _of_index(folder, folder / indexes[0], findings, present=files)
    if not files:
        raise CannotRun(
            f"{plain(folder)}: no *.safetensors and no *{INDEX_SUFFIX} among its {len(names)} files", hint="name an outer-scale JSON file itself"
        )
    return Shards(folder, tuple(folder / name for name in files), None, _check_numbering(files, findings))


def _check_numbering(files: list[str], findings: Findings) -> bool:
    """Shards without an index still say how many they are; True when one is missing."""
    partial = False
    series: dict[tuple[str, int], set[int]] = {}
    for name in files:
        found = _SHARD_NAME.match(name)
        if found:
            series.setdefault((found[1], int(found[3])), set()).add(int(found[2]))
    for (stem, total), there in series.items():
        missing = [number for number in range(1, total + 1) if number not in there]
        partial = partial or bool(missing)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            name = f"{stem}-{missing[0]:05}-of-{total:05}.safetensors"
            findings.error("missing-shard", f"absent{more}", f"{total} shards", "the tensors in it were not checked, and will not load", tensor=name)
    return partial


def _of_index(path: Path, index: Path, findings: Findings, present: list[str] | None = None) -> Shards:
    weight_map = _weight_map(index, findings)
    folder = index.parent
    names: list[str] = []
    for name in dict.fromkeys(weight_map.values()):
        if "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name:
            findings.error(
                "shard-name",
                shown(name),
                "a file's name without a folder",
                "not opened: an index must not lead out of its folder",
                tensor="weight_map",
            )
        elif not (folder / name).exists():
            findings.error(
                "missing-shard", "absent", f"a file that {plain(index.name)} names", "its tensors were not checked, and will not load", tensor=name
            )
        else:
            names.append(name)
    if present is None:
        present = [item.name for item in folder.glob("*.safetensors")]
    for name in sorted(set(present) - set(names)):
        findings.warning(
            "extra-shard",
            "in the folder",
            f"a file that {plain(index.name)} names",
            "not read here; engines that take every file load it",
            tensor=name,
        )
    return Shards(path, tuple(folder / name for name in names), weight_map, len(names) < len(set(weight_map.values())))


def _weight_map(index: Path, findings: Findings) -> dict[str, str]:
    """Tensor -> shard file name, read as it is parsed: a tree of a large model's index would be its largest object."""
    found: dict[str, str] = {}
    shards: dict[str, str] = {}
    keys: set[str] = set()

    def read_tensor(name: str, at: int) -> int:
        shard, end = read_value(text, at)
        if name in found:
            report_duplicate(f"weight_map.{name}", findings)
        if not isinstance(shard, str):
            findings.error("weight-map", plain(shard), "a shard's file name", "the tensor will not load", tensor=name)
        else:
            found[name] = shards.setdefault(shard, shard)
        return end

    def read_field(name: str, at: int) -> int:
        if name in keys:
            report_duplicate(name, findings)
        keys.add(name)
        if name == "weight_map" and text[at : at + 1] == "{":
            return read_object(text, at, read_tensor)
        return read_value(text, at)[1]

    try:
        text, marked = decode(read_bytes(index))
        report_mark(marked, findings)
        start = len(text) - len(text.lstrip())
        end = read_object(text, start, read_field)
        if text[end:].strip():
            raise MalformedJson(f"character {end}: text after the object")
    except MalformedJson as error:
        findings.error("malformed-json", str(error), "one JSON object in UTF-8", "nothing says which shards there are", tensor=index.name)
        return {}
    if not found:
        findings.error("weight-map", "absent or empty", '"weight_map": {tensor: shard}', "nothing says which shards there are", tensor=index.name)
    return found
