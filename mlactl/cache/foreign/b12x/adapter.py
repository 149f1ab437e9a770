"""A b12x root behind the interface that the cache commands talk to."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mlactl.cache import elf, listing, roots
from mlactl.cache.adapter import CacheEntry, Description, KernelRow, RootKind
from mlactl.cache.entry import Status
from mlactl.cache.foreign.b12x import entry as entries
from mlactl.cache.foreign.b12x import manifest as manifests
from mlactl.cache.foreign.b12x import payload as payloads
from mlactl.cache.foreign.b12x import prune, why
from mlactl.cache.foreign.b12x.entry import Entry
from mlactl.cache.foreign.b12x.manifest import Rejected
from mlactl.cache.prefix import entry_of
from mlactl.cache.removal import PrunePlan
from mlactl.cache.selectors import Selectors
from mlactl.errors import CannotRun, Interrupted
from mlactl.kernels.spec import CompileSpec


def _untold(_text: str) -> None:
    pass


class B12xCache:
    """One b12x root (`adapter.CacheAdapter`). Nothing is loaded or run, and nothing written but by `removal.apply`, `set_aside` and `put_back`."""

    kind = RootKind.B12X

    def __init__(self, root: Path, remarks: tuple[str, ...] = ()) -> None:
        self.root = root
        self.paths = (root,)
        self.writable: Path | None = root
        self.remarks = remarks
        self._uses = roots.keeps_access_times(root)

    # ---- what there is

    def entries(self, *, on_problem: Callable[[str], None] | None = None) -> list[Entry]:
        """Every entry and temporary, by names, sizes and manifests; what is passed over is told to `on_problem`. Raises CannotRun."""
        with listing.uncollected():
            return list(entries.in_root(self.root, uses=self._uses, on_problem=on_problem or _untold))

    def entry(self, prefix: str) -> Entry:
        """The entry of a key or unique start of one, one that was set aside only where there is no other; raises NotFound and UsageError."""

        def matching(start: str) -> Iterator[Entry]:
            for bucket in entries.buckets(self.root):
                if bucket.startswith(start[:2]):
                    yield from (entry for entry in self._in_bucket(bucket) if entry.key.startswith(start) and not entry.residue)

        return entry_of(prefix, str(self.root), matching)

    def entries_of(self, prefix: str) -> list[Entry]:
        """The entry of the key, and those of it that were set aside; raises NotFound and UsageError."""
        key = self.entry(prefix).key
        return [entry for entry in self._in_bucket(key[:2]) if entry.key == key and not entry.residue]

    def _in_bucket(self, bucket: str) -> list[Entry]:
        try:
            return list(entries.in_bucket(self.root, bucket, uses=self._uses))
        except OSError:
            return []

    def row(self, entry: CacheEntry) -> dict[str, Any]:
        """One row of `cache ls --json`: that of our own entries, and what only this format has."""
        found = _ours(entry)
        return {
            **listing.as_json(found),
            "root_kind": self.kind,
            "cache_format": found.manifest.cache_format if found.manifest is not None else None,
            "written": listing.iso_time(found.written),
        }

    def made_by(self, entry: CacheEntry) -> str | None:
        """Package fingerprint and versions of what compiled it."""
        found = _ours(entry)
        if found.manifest is None:
            return None
        try:
            maker = entries.read_maker(found)
        except (OSError, Rejected):
            return None
        tools = dict(payloads.pairs(maker.toolchain))
        versions = [f"{name} {tools[name]}" for name in ("cutlass_dsl", "torch", "torch_cuda") if tools.get(name)]
        return ", ".join([f"package {maker.package_fingerprint[:12]}", *versions])

    # ---- looking closely

    def examine(self, entry: CacheEntry, *, digests_only: bool = False) -> Entry:
        """The entry with the status of a full check."""
        return entries.examine(_ours(entry), digests_only=digests_only)

    def in_place(self, entry: CacheEntry) -> Entry:
        """An entry that was set aside with the status that the full check would give it were it put back."""
        return entries.in_place(_ours(entry))

    def masked(self, entry: CacheEntry) -> bool:
        """Never: b12x has one root, and loads what it compiled again whether or not the same object was set aside."""
        return False

    def verify(
        self, wanted: Iterable[CacheEntry], *, digests_only: bool = False, on_done: Callable[[int], None] = lambda _steps: None
    ) -> list[Entry]:
        """`examine` of each; one that looks bad is read again, so that what b12x replaces meanwhile is not called damaged."""
        checked: list[Entry] = []
        try:
            for entry in wanted:
                found: Entry | None = self.examine(entry, digests_only=digests_only)
                if found is not None and found.status is not Status.OK:
                    now = entries.again(_ours(entry), uses=self._uses)
                    found = now and entries.examine(now, digests_only=digests_only)
                if found is not None:
                    checked.append(found)
                on_done(1)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted: {len(checked)} entries were checked, nothing was changed", hint="run it again, or name keys to check fewer"
            ) from None
        return checked

    def read_object(self, entry: CacheEntry) -> bytes:
        """The object's bytes, read without following links; raises OSError."""
        return entries.read_object(_ours(entry))

    def describe(self, entry: CacheEntry, *, show_secrets: bool = False) -> Description:
        """An entry in full; recorded environment values only with `show_secrets`."""
        found = self.examine(entry)
        document, problem = None, ""
        if found.manifest_path is not None:
            try:
                document = entries.read_document(found)
            except (OSError, Rejected) as error:
                problem = error.reason if isinstance(error, Rejected) else ""
        facts: elf.ForeignIdentity | None = None
        kernels: tuple[KernelRow, ...] = ()
        try:
            facts = elf.identify_foreign(entries.read_object(found))
            smem = manifests.dynamic_smem(document.raw) if document is not None else {}
            kernels = tuple(_kernel_row(kernel, smem) for cubin in facts.cubins for kernel in elf.resources(cubin))
        except elf.BadElf as error:
            problem = problem or error.reason
        except OSError as error:
            problem = problem or f"{found.object_path}: {error.strerror}"
        return Description(
            entry=found,
            manifest_path=found.manifest_path,
            manifest=manifests.public(document, show_secrets=show_secrets) if document is not None else None,
            lines=_lines(found, document, facts, show_secrets=show_secrets),
            kernels=kernels,
            symbols=entries.entry_points(facts.symbols) if facts is not None else None,
            signature=None,
            object_arch=facts.arch if facts is not None else None,
            problem=problem,
        )

    def explain(self, entry: CacheEntry, *, show_secrets: bool = False) -> why.Explanation:
        """What an entry was built from and what forks it from its nearest sibling."""
        return why.explain(_ours(entry), self.entries(), show_secrets=show_secrets)

    # ---- removing and setting aside

    def plan(
        self,
        selectors: Selectors,
        *,
        keep: Iterable[CompileSpec] = (),
        include_prepared: bool = False,
        on_problem: Callable[[str], None] | None = None,
    ) -> PrunePlan:
        """What `cache prune` removes; raises CannotRun, and UsageError for a selection that cannot be made on a foreign root."""
        tell = on_problem or _untold
        found = self.entries(on_problem=tell)
        kept = bool(tuple(keep))
        return prune.plan(self.root, found, selectors, kept_profiles=kept, include_prepared=include_prepared, now=time.time(), on_problem=tell)

    def plan_entries(
        self, wanted: Iterable[CacheEntry], *, include_prepared: bool = False, on_problem: Callable[[str], None] | None = None
    ) -> PrunePlan:
        """What `cache rm` removes."""
        tell = on_problem or _untold
        named = [_ours(entry) for entry in wanted]
        return prune.plan_entries(self.root, self.entries(), named, include_prepared=include_prepared, now=time.time(), on_problem=tell)

    def set_aside(self, wanted: Iterable[CacheEntry]) -> Sequence[str]:
        """Renames entries so that no release of b12x loads them; the keys that now are. Raises CannotRun when one could not be."""
        return self._each(wanted, prune.set_aside, "set aside")

    def put_back(self, wanted: Iterable[CacheEntry]) -> Sequence[str]:
        """Undoes `set_aside`; the keys that are back. Raises CannotRun when one could not be."""
        return self._each(wanted, prune.put_back, "put back")

    def _each(self, wanted: Iterable[CacheEntry], move: Callable[[Entry], str | None], done: str) -> list[str]:
        moved, failed = [], []
        for entry in wanted:
            reason = move(_ours(entry))
            if reason is None:
                moved.append(entry.key)
            else:
                failed.append(reason)
        if failed:
            raise CannotRun(
                f"{len(moved)} of {len(moved) + len(failed)} entries were {done}; {failed[0]}",
                hint=f"mlactl cache ls --root-kind b12x --cache-dir {shlex.quote(str(self.root))}",
            )
        return moved


def _ours(entry: CacheEntry) -> Entry:
    assert isinstance(entry, Entry)
    return entry


def _kernel_row(kernel: elf.KernelResources, smem: dict[str, int]) -> KernelRow:
    # The manifest names kernels as the host code does, with the module's prefix or without.
    dynamic = smem.get(kernel.name)
    return KernelRow(kernel.name, kernel.registers, kernel.frame_bytes, kernel.local_bytes, kernel.static_smem_bytes, dynamic)


def _lines(
    entry: Entry, document: manifests.Document | None, facts: elf.ForeignIdentity | None, *, show_secrets: bool
) -> tuple[tuple[str, str], ...]:
    """What a person wants of the manifest, in a line each; environment values only with `show_secrets`."""
    found: list[tuple[str, str]] = []
    if entry.manifest is not None:
        found += [("format", f"{entry.manifest.cache_format}, {entry.manifest.schema}"), ("object", f"sha256 {entry.manifest.object_sha256}")]
        found += [("semantic key", entry.manifest.semantic_key)] if entry.manifest.semantic_key else []
        found += [("device", " ".join(map(str, entry.manifest.device)))] if entry.manifest.device else []
    payload = document.payload if document is not None else None
    if payload is not None:
        flat = why.flat(payload)
        versions = {name.removeprefix("toolchain."): value for name, value in flat.items() if name.startswith("toolchain.")}
        tools = ", ".join(f"{name} {value}" for name, value in versions.items() if isinstance(value, str) and value)
        variables = [f"{name}={value}" if show_secrets else name for name, value in payloads.environment(payload) if value]
        found += [("target", str(flat["target"])), ("package", str(flat["fingerprint"])), ("toolchain", tools or "not recorded")]
        found += [("options", " ".join(map(str, flat["options"] or ())) or "none"), ("environment", ", ".join(variables) or "nothing set")]
    if facts is not None:
        found.append(("host", facts.host))
    found.append(("written", listing.iso_time(entry.written) or "-"))
    return tuple(found)
