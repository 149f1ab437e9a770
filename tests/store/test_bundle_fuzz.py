"""Whatever the bytes: nothing is published from a bundle that is not whole, and no error but the one for it comes out."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import test_bundle
import tiny
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlactl.cache.bundle import merge
from mlactl.cache.bundle.layout import BadBundle
from mlactl.cache.bundle.read import Bundle
from mlactl.cache.store import Entry, Store

FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=150)


@pytest.fixture
def bundle(store: Store, publish: Callable[..., Entry]) -> bytes:
    publish()
    publish(tiny.spec(3))
    return test_bundle.bundle_of(store)


def refused(data: bytes) -> bool:
    """Whether reading it ends in the one error there is for it; any other comes through."""
    try:
        for _ in Bundle(io.BytesIO(data)).entries():
            pass
    except BadBundle:
        return True
    return False


@FIXTURES
@given(st.binary(max_size=4096))
def test_arbitrary_bytes(data: bytes) -> None:
    assert refused(data)
    assert refused(zstandard.ZstdCompressor().compress(data))


@FIXTURES
@given(st.data())
def test_any_change_of_the_file_or_of_the_archive_in_it(bundle: bytes, data: st.DataObject) -> None:
    packed = data.draw(st.booleans(), label="inside")
    original = test_bundle.unpacked(bundle) if packed else bundle
    at = data.draw(st.integers(0, len(original) - 1), label="at")
    old = original[at : at + data.draw(st.integers(0, 600), label="length")]
    new = data.draw(st.one_of(st.binary(max_size=64), st.just(bytes(len(old))), st.just(original[:512])), label="new")
    changed = original[:at] + new + original[at + len(old) :]
    changed_bundle = test_bundle.repacked(changed) if packed else changed
    # A few bits of a zstd frame mean nothing; then the archive inside is the same.
    assert refused(changed_bundle) or test_bundle.unpacked(changed_bundle) == test_bundle.unpacked(bundle)


@settings(FIXTURES, max_examples=15)
@given(st.data())
def test_nothing_is_published_from_a_changed_bundle(bundle: bytes, tmp_path: Path, data: st.DataObject) -> None:
    tar = test_bundle.unpacked(bundle)
    at = data.draw(st.integers(0, len(tar) - 1))
    changed = bytearray(tar)
    changed[at] ^= data.draw(st.integers(1, 255))
    node = Store.open(str(tmp_path / "node"))
    with pytest.raises(BadBundle):
        merge.bring_in(node, io.BytesIO(test_bundle.repacked(bytes(changed))))
    assert list(node.entries()) == []
