"""Opening scale files: JSON up to a limit, and the first bytes that tell what a file is."""

from __future__ import annotations

import os
from pathlib import Path

from mlactl import regular_files
from mlactl.regular_files import open_regular, sha256_of, unreadable
from mlactl.scales.strict_json import MAX_JSON_BYTES

__all__ = ["first_bytes", "open_regular", "read_bytes", "sha256_of", "unreadable"]


def read_bytes(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Every byte of a JSON file; raises CannotRun when it cannot be read or has more than `limit_bytes`."""
    return regular_files.read_bytes(path, limit_bytes, "JSON", "name a checkpoint's files *.safetensors to have them scanned")


def first_bytes(path: Path, count: int) -> bytes:
    """At most `count` bytes from the start of a file; raises CannotRun."""
    with open_regular(path) as (descriptor, _):
        try:
            return os.pread(descriptor, count, 0)
        except OSError as error:
            raise unreadable(path, error) from error
