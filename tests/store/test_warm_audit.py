"""What warmup really makes, held to account: both variants of a shipped profile's sparse decode, their machine code read."""

from __future__ import annotations

from pathlib import Path

from mlactl import profiles
from mlactl.cache.adapters import open_cache
from mlactl.cache.advisories import bundled
from mlactl.cache.audit import Verdict, audit
from mlactl.cache.machine_code import Reading
from mlactl.cache.store import Store
from mlactl.warmup import plan, pool

DECODE = "attention.mla.sm120.decode"


def test_what_warmup_makes_of_a_shipped_profile_is_acquitted(tmp_path: Path) -> None:
    root = str(tmp_path / "cache")
    items = plan.make_plan(profiles.load("glm-5.2-tp4-dcp4"), ["sm_120a"], Store.open(root)).items
    wanted = [item for item in items if item.spec.kernel_id == DECODE and item.spec.fact("tile") == "heads16"]
    assert [item.spec.fact("latent_scale_identity") for item in wanted] == [0, 1]
    made = pool.compile_missing(wanted, jobs=2, cache_dir=root, shared=False)
    assert (len(made.outcomes), made.unfinished) == (2, ()), made.outcomes
    cache = open_cache(root)
    report = audit(cache, cache.entries(), bundled())
    assert [result.verdict for result in report.results] == [Verdict.CLEAN] * 2, report.results
    found = {}
    for result in report.results:
        assert result.code is not None
        assert (result.code.parameter, result.code.ordinal) == ("latent_scale", 22)
        found[dict(result.entry.manifest.spec.facts)["latent_scale_identity"]] = result.code.reading  # type: ignore[union-attr]
    assert found == {0: Reading.READ, 1: Reading.NOT_READ}
