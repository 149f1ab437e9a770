"""A cache that the released package wrote: read, explained, pruned and set aside, with the package's own loader as the judge.

One test, because one process has to be the package throughout: importing it with its compiler takes most of the time.
"""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from b12x_files import Root

from mlactl.cache import adapters
from mlactl.cache.adapter import RootKind
from mlactl.cache.advisories import bundled, takes_outer_scale
from mlactl.cache.audit import audit, restore
from mlactl.cache.removal import apply
from mlactl.cache.selectors import Selectors, parse_spec

VERSION = "1.5.1"
DECODE = "attention.mla.sm120.decode"
FORWARD, MERGE = "attention.dense_mla.forward", "attention.dense_mla.merge"


class Package:
    """The process that has the package: it fills a root and then says what its loader takes."""

    def __init__(self, root: Path) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("B12X_", "CUTE_", "CUTLASS_", "XDG_", "CUDA_"))}
        script = Path(__file__).with_name("make_cache.py")
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, script, root], env={**env, "PYTHONDONTWRITEBYTECODE": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self):
        line = self.process.stdout.readline()
        assert line, f"the package's process ended with {self.process.wait()}"
        return json.loads(line)

    def loads(self, *keys):
        self.process.stdin.write(json.dumps({"root": str(self.root), "keys": keys}) + "\n")
        self.process.stdin.flush()
        found = self.answer()
        return [found[key] for key in keys]


@pytest.fixture
def package(tmp_path):
    try:
        found = importlib.metadata.version("b12x")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        pytest.fail(f"b12x {VERSION} is needed and {found} is installed: pip install --no-deps -c constraints.txt b12x", pytrace=False)
    running = Package(tmp_path / "b12x")
    with running.process:
        yield running
        running.process.stdin.close()


def test_a_cache_that_the_package_wrote(package):
    made = package.answer()
    cache, root = adapters.open_cache(str(package.root)), Root(package.root)
    assert cache.kind is RootKind.B12X
    entries = {entry.key: entry for entry in cache.entries()}
    (stray,) = made["stray"]
    assert entries.keys() == {*made["keys"], *made["sparse"], stray}
    by_kernel = {entries[key].manifest.spec.kernel_id: key for key in made["keys"]}
    assert by_kernel.keys() == {FORWARD, MERGE}
    forward, merge = by_kernel[FORWARD], by_kernel[MERGE]

    what_it_recorded_is_read(cache, entries, forward, merge)
    the_planned_sparse_decode_reads_its_scale_and_is_noticed(cache, [entries[key] for key in made["sparse"]])
    the_stray_variable_is_named_and_not_told(cache, merge, stray, *made["variable"])
    assert package.loads(forward, merge, stray) == ["loaded"] * 3

    what_is_set_aside_is_a_miss_until_it_is_back(package, cache, forward)
    what_is_removed_is_a_miss_and_the_rest_is_loaded(package, cache, root, stray, forward, merge)
    damage_is_called_what_the_package_calls_a_miss(package, cache, root, forward, merge)


def what_it_recorded_is_read(cache, entries, forward, merge):
    assert {entry.status for entry in entries.values()} == {"ok"}
    assert [entry.status for entry in cache.verify(entries.values())] == ["ok"] * 5
    found = entries[forward].manifest
    facts = dict(found.spec.facts)
    assert (found.spec.version, found.arch, found.device) == (4, "sm_120a", ("cuda", (12, 0), 188))
    assert [facts[name] for name in ("dtype", "heads", "page_size")] == ["bf16", 12, 256]
    assert facts["q"][:4] == ["tensor", "q", "torch.bfloat16", 3]
    described = cache.describe(entries[merge])
    assert (described.symbols, described.object_arch, described.problem) == ((f"b12x_cute_{merge}",), "sm_120a", "")
    (kernel,) = described.kernels
    assert kernel.registers > 0
    assert kernel.dynamic_smem_bytes == next(iter(described.manifest["launch_metadata"]["launch_dynamic_smem_bytes"].values()))[0]
    assert described.manifest["cache_format"] == "b12x_cute_compile_cache_v7_explicit_spec"


def the_planned_sparse_decode_reads_its_scale_and_is_noticed(cache, sparse):
    """The shipped parameter's place against the object that it was read off; the plan was made with a scale of 0.37."""
    decode = next(entry for entry in sparse if entry.manifest.spec.kernel_id == DECODE)
    facts = dict(decode.manifest.spec.facts)
    assert (decode.manifest.spec.version, facts["scale_format"], facts["latent_scale_identity"]) == (53, 2, 1)
    assert takes_outer_scale(decode.manifest.spec, RootKind.B12X)
    (result,) = audit(cache, [decode], bundled()).results
    assert (result.verdict, [advisory.id for advisory in result.advisories]) == ("notice", ["b12x-planned-path-without-scale"])
    assert (result.code.parameter, result.code.ordinal, result.code.offset, result.code.size_bytes) == ("latent_scale", 6, 0x424, 4)
    assert (result.code.reading, decode.manifest.arch) == ("read", "sm_120a")
    assert any("c[0x0][0x424]" in line for line in result.code.instructions)
    cache.set_aside([decode])
    assert audit(cache, cache.entries_of(decode.key), bundled()).results[0].code == result.code, "read where it was set aside to"
    (back,) = restore(cache, cache.entries_of(decode.key), bundled())
    assert back.done


def the_stray_variable_is_named_and_not_told(cache, merge, stray, name, value):
    found = cache.explain(cache.entry(merge))
    assert (found.sibling.key, found.relation, [fork.field for fork in found.forks]) == (stray, "same kernel id and facts", [f"environment.{name}"])
    assert value not in repr(found) + repr(cache.describe(cache.entry(stray)))
    assert value in repr(cache.explain(cache.entry(stray), show_secrets=True).built_from)


def what_is_set_aside_is_a_miss_until_it_is_back(package, cache, forward):
    cache.set_aside([cache.entry(forward)])
    assert package.loads(forward) == ["miss"]
    assert cache.entry(forward).status == "quarantined"
    cache.put_back([cache.entry(forward)])
    assert package.loads(forward) == ["loaded"]
    assert cache.verify([cache.entry(forward)])[0].status == "ok"


def what_is_removed_is_a_miss_and_the_rest_is_loaded(package, cache, root, stray, forward, merge):
    root.prepare(merge)
    plan = cache.plan(Selectors(specs=(parse_spec(f"{MERGE}<5"),)))
    assert [entry.key for entry in plan.entries] == [stray]
    assert [kept.key for kept in plan.kept] == [merge]
    assert apply(plan).removed == (stray,)
    assert package.loads(stray, forward, merge) == ["miss", "loaded", "loaded"]
    assert root.file(stray, "lock").exists()


def damage_is_called_what_the_package_calls_a_miss(package, cache, root, forward, merge):
    """What this listing calls ok the package loads, and what it does not, the package does not either."""
    whole = root.file(forward, "o").read_bytes()
    root.file(forward, "o").write_bytes(whole[:-1])
    assert (cache.entry(forward).status, package.loads(forward)) == ("size", ["miss"])
    root.file(forward, "o").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert (cache.verify([cache.entry(forward)])[0].status, package.loads(forward)) == ("digest", ["miss"])
    root.file(forward, "o").write_bytes(whole)
    assert (cache.verify([cache.entry(forward)])[0].status, package.loads(forward)) == ("ok", ["loaded"])
    root.file(merge, "json").unlink()
    assert (cache.entry(merge).status, package.loads(merge)) == ("no-manifest", ["miss"])
    # The tag, the key and the digest that a manifest gives are those of the bytes on disk.
    manifest = json.loads(root.file(forward, "json").read_text())
    assert hashlib.sha256(manifest["cache_payload_repr"].encode()).hexdigest() == forward
