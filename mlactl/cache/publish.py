"""Putting an object into the store, so that every crash leaves a valid cache.

Compiling and linking happen in a private scratch folder outside the cache. Publishing writes one temporary at a time
beside the entry: the object, flushed and renamed into place, then the manifest, whose rename is the commit. A writer
killed anywhere leaves at worst one temporary, or an object without a manifest, and both are misses.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from mlactl.cache import elf, flush, locks, trust
from mlactl.cache import toolchain as toolchains
from mlactl.cache.entry import Entry, RejectedObject, Status, linked, read_checked, read_entry, status_of_part
from mlactl.cache.key import KeyInputs, inputs_for, symbol_for
from mlactl.cache.manifest import SCHEMA_VERSION, KernelResources, Manifest, dump
from mlactl.cache.roots import Layer, Roots
from mlactl.cache.store import TEMP_SUFFIX, Miss, Store
from mlactl.errors import CannotRun, EnvironmentUnfit
from mlactl.kernels import registry
from mlactl.kernels.compiler import compile_object
from mlactl.kernels.errors import CompileFailed, MlactlError
from mlactl.kernels.spec import CompileSpec

Compiler = Callable[[CompileSpec, str, str, str, Path], int | None]
"""(spec, arch, symbol, flavour, out): writes the relocatable object to `out`; returns its launch's dynamic shared memory in bytes."""

LOCK_TIMEOUT_S = 600.0
LINK_FLAGS = ("-shared", "--build-id=none", "--hash-style=gnu")
SCRATCH_PREFIX = "mlactl-compile-"
_LINKER_VARIABLES = frozenset({"LD_RUN_PATH", "LDEMULATION", "GNUTARGET"})
"""Variables through which `ld` would write something of this machine into the object."""


@dataclass(frozen=True, slots=True)
class PublishResult:
    """`compiled` is False when the entry was there already; `seconds` is what compiling and linking took."""

    entry: Entry
    compiled: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Build:
    """How an object came to be, as far as neither its key nor its bytes say it.

    `code_sha256` is of the exported object before linking; `created` is ISO 8601 UTC to the second; `dynamic_smem_bytes`
    what its launch asks for, None when the compiler was not told.
    """

    code_sha256: str
    linker: str
    compile_s: float
    dynamic_smem_bytes: int | None = None
    python: str = field(default_factory=toolchains.python_minor)
    created: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))


def find_linker() -> tuple[str, str]:
    """Path of `ld` and its name with version, as manifests record it; raises EnvironmentUnfit when there is none."""
    path = shutil.which("ld")
    if path is None:
        raise EnvironmentUnfit(
            "no linker: ld is not in PATH, and objects are linked with it", hint="apt-get install binutils, or your distribution's package of it"
        )
    return path, _linker_version(path)


@lru_cache
def _linker_version(path: str) -> str:
    ran = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    first = ran.stdout.partition("\n")[0].strip()
    if ran.returncode != 0 or not first:
        raise EnvironmentUnfit(f"{path} --version failed with exit code {ran.returncode}: {ran.stderr.strip()[:200]}", hint="reinstall binutils")
    return first


def compile_and_publish(
    store: Store, spec: CompileSpec, arch: str, *, shared: bool = False, lock_timeout_s: float = LOCK_TIMEOUT_S, compiler: Compiler = compile_object
) -> PublishResult:
    """Makes sure the store holds a good object of (spec, arch), compiling it unless another process did meanwhile.

    `shared` makes the root readable for other users (0755/0644); otherwise a new root is 0700 and an existing one keeps
    its ways. Raises CompileFailed, NotBuiltYet, EnvironmentUnfit (no compiler, no linker, wrong flavour), LockBusy,
    Untrusted, or CannotRun naming path, owner and mode when the root cannot be written; nothing is published then.
    """
    registry.require_built(spec)
    inputs = inputs_for(spec, arch)
    linker_path, linker = find_linker()
    layer, key = store.roots.require_writable(), inputs.key()
    refuse_links(layer, key)
    with writing(layer.path):
        mode = prepare(layer, key, shared=shared)
        trust.check_folders(layer.bucket(key), str(layer.path))
        with locks.entry_lock(layer, key, exclusive=True, wait_s=lock_timeout_s):
            present = store.search(spec, arch, read_checked)
            if not isinstance(present, Miss):
                return PublishResult(present[0], compiled=False, seconds=0.0)
            refuse_folders(layer, key)
            remove_temporaries(layer, key)
            build, data = _compile_and_link(inputs, compiler, linker_path, linker)
            try:
                entry = publish_object(layer, inputs, data, build, mode=mode, below=store.roots.layers)
            except RejectedObject as rejected:
                raise CompileFailed(f"{spec.label()} for {arch}: the compiler's object was not published: {rejected.entry.detail}") from None
            return PublishResult(entry, compiled=True, seconds=build.compile_s)


def publish_object(layer: Layer, inputs: KeyInputs, data: bytes, build: Build, *, mode: int = 0o600, below: Iterable[Layer] = ()) -> Entry:
    """Publishes a linked object's bytes under the key of `inputs`; the caller holds the entry's exclusive lock.

    `mode` is the files' (`prepare` returns it), `below` the other layers of the roots. Raises RejectedObject when the object
    is not one of that key, arch and host, CannotRun when it is the very object that one of the layers has quarantined under
    this key, and OSError when it cannot be written; an older manifest of the key may be gone then, and nothing half written
    stays.
    """
    key, bucket = inputs.key(), layer.bucket(inputs.key())
    manifest = _describe(layer, inputs, data, build)
    for each in dict.fromkeys((layer, *below)):
        _refuse_quarantined(each, key, manifest.object_sha256)
    with _temporary(bucket, key, data, mode) as written:
        replace_object(bucket, key, written)
    with _temporary(bucket, key, dump(manifest), mode) as written:
        os.rename(written, f"{bucket}/{key}.json")  # noqa: PTH104
    flush.folder(bucket)
    entry = read_entry(layer, key)
    assert entry is not None, "the entry's lock is held"
    return entry


def replace_object(bucket: str, key: str, written: str) -> None:
    """Puts a flushed file in the place of an entry's object; the entry has no manifest afterwards, quarantined or not. The caller
    holds its lock."""
    # Before the object is replaced, so that no crash leaves the old manifest beside the new object.
    for suffix in ("json", "quarantined"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{bucket}/{key}.{suffix}")  # noqa: PTH108  an import does this thousands of times
    os.rename(written, f"{bucket}/{key}.so")  # noqa: PTH104


def _describe(layer: Layer, inputs: KeyInputs, data: bytes, build: Build) -> Manifest:
    """The manifest of a linked object, its symbol, signature, arch and resources read from its bytes.

    Raises RejectedObject when they are not what `inputs` asked for.
    """
    key = inputs.key()
    symbol = symbol_for(key)

    def rejected(status: Status, detail: str) -> RejectedObject:
        return RejectedObject(Entry(key, layer, None, status, detail, len(data)))

    try:
        facts = elf.inspect(data)
    except elf.BadElf as error:
        raise rejected(status_of_part(error.part), error.reason) from None
    if facts.arch != inputs.arch or facts.host != inputs.host_arch:
        raise rejected(Status.ARCH, f"it is for {facts.arch} on {facts.host}, asked for was {inputs.arch} on {inputs.host_arch}")
    if symbol not in facts.symbols:
        raise rejected(Status.SYMBOL, f"it exports {', '.join(facts.symbols)}, expected {symbol}")
    # The compiler speaks of the one launch of an object; with several kernels it would not say whose it is.
    dynamic = build.dynamic_smem_bytes if len(facts.kernels) == 1 else None
    return Manifest(
        schema_version=SCHEMA_VERSION,
        key=key,
        spec=inputs.spec,
        arch=inputs.arch,
        host_arch=inputs.host_arch,
        sources_digest=inputs.sources_digest,
        toolchain=inputs.toolchain,
        python=build.python,
        options=inputs.options,
        linker=build.linker,
        object_sha256=hashlib.sha256(data).hexdigest(),
        object_bytes=len(data),
        code_sha256=build.code_sha256,
        symbol=symbol,
        signature=facts.signature,
        resources=tuple(KernelResources(each.name, each.registers, each.frame_bytes, each.static_smem_bytes, dynamic) for each in facts.kernels),
        created=build.created,
        compile_s=round(build.compile_s, 3),
    )


def prepare(layer: Layer, key: str, *, shared: bool = False) -> int:
    """Makes the folders of a key's entry and returns the mode for its files; raises OSError.

    New folders are 0700, below a root that others may read (or when `shared`) 0755; files then 0644 instead of 0600.
    """
    mode = prepare_root(layer, shared=shared)
    prepare_bucket(layer, key)
    return mode


def prepare_root(layer: Layer, *, shared: bool = False) -> int:
    """`prepare` without the bucket; a root of another tool is refused before it becomes one of both."""
    if not os.path.isdir(layer.folder()):  # noqa: PTH112
        from mlactl.cache.adapters import require_own  # here: a root is made once, and most processes make none

        require_own(Roots((layer,)))
    missing = [path for path in (layer.path, *layer.path.parents) if not path.exists()]
    for path in reversed(missing):
        _make_folder(path, 0o755 if shared else 0o700)
    readable = _readable(layer)
    if shared and not readable:
        share(layer)
        readable = True
    _make_folder(Path(layer.folder()), 0o755 if readable else 0o700)
    return 0o644 if readable else 0o600


def prepare_bucket(layer: Layer, key: str) -> None:
    """Makes the bucket of a key in a prepared root."""
    _make_folder(Path(layer.bucket(key)), 0o755 if _readable(layer) else 0o700)


def _readable(layer: Layer) -> bool:
    return layer.path.stat().st_mode & 0o005 == 0o005


def share(layer: Layer) -> None:
    """Makes a private root's own files readable for other users: folders 0755, files 0644; files of other names stay as they are."""
    layer.path.chmod(0o755)
    folder = Path(layer.folder())
    if not folder.is_dir():
        return
    folder.chmod(0o755)
    root_lock = Path(locks.root_lock_path(layer))
    if root_lock.is_file():
        root_lock.chmod(0o644)
    for bucket in folder.glob("[0-9a-f][0-9a-f]"):
        if bucket.is_symlink() or not bucket.is_dir():
            continue
        bucket.chmod(0o755)
        for path in bucket.iterdir():
            if path.suffix in (".so", ".json", locks.LOCK_SUFFIX) and path.name.startswith(bucket.name) and not path.is_symlink():
                path.chmod(0o644)


def remove_temporaries(layer: Layer, key: str) -> None:
    """Removes what writers of this key left; the caller holds its exclusive lock, so nobody is writing them any more."""
    bucket = layer.bucket(key)
    for name in os.listdir(bucket):
        if name.startswith(f"{key}.") and name.endswith(TEMP_SUFFIX):
            Path(bucket, name).unlink(missing_ok=True)


def _refuse_quarantined(layer: Layer, key: str, object_sha256: str) -> None:
    """What was convicted does not come back by being made again; another object, such as the right one, takes its place.

    A quarantined manifest that cannot be read does not say what was convicted: then nothing takes its place.
    """
    entry = read_entry(layer, key)
    if entry is None or entry.status is not Status.QUARANTINED:
        return
    hint = f"mlactl cache show {key} says why it was set aside; mlactl cache rm {key} forgets it"
    if not layer.writable:
        hint = f"{hint}, both with --cache-dir {shlex.quote(str(layer.path))}"
    if entry.manifest is None:
        raise CannotRun(f"{key} is quarantined with a manifest that cannot be read, so nothing says which object was convicted", hint=hint)
    if entry.manifest.object_sha256 == object_sha256:
        raise CannotRun(f"{key} is quarantined, and this is the very object that was set aside: sha256 {object_sha256}", hint=hint)


def refuse_folders(layer: Layer, key: str) -> None:
    """Raises CannotRun for a folder in the place of an entry's file, which no rename replaces as it does a link or a FIFO."""
    for path in (f"{layer.bucket(key)}/{key}.so", f"{layer.bucket(key)}/{key}.json"):
        if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114
            raise CannotRun(f"{path} is a directory, expected a regular file or nothing", hint=f"ls -ld {shlex.quote(path)}; move it away")


def require_writable(store: Store) -> Layer:
    """The layer to publish to; raises what publishing would, as far as the folders tell beforehand: CannotRun or Untrusted."""
    layer = store.roots.require_writable()
    refuse_links(layer, "")
    trust.check_folders(layer.folder(), str(layer.path))
    with writing(layer.path):
        for path in (Path(layer.folder()), layer.path, *layer.path.parents):
            try:
                info = path.stat()
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(info.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            if not os.access(path, os.W_OK | os.X_OK):
                read_only = os.statvfs(path).f_flag & os.ST_RDONLY
                number = errno.EROFS if read_only else errno.EACCES
                raise PermissionError(number, os.strerror(number), str(path))
            break
    return layer


def refuse_links(layer: Layer, key: str) -> None:
    """Raises CannotRun for a link in the place of `v1` or of a key's bucket."""
    link = linked(layer, key)
    if link is not None:
        hint = f"ls -ld {shlex.quote(link)}; the root itself may be a link"
        raise CannotRun(f"{link} is a symbolic link, expected a folder: below the root none is followed", hint=hint)


# ---- compile and link

_loaded_sources: dict[str, str] = {}
"""Digest of each kernel's sources as they were when this process first compiled it, and so imported them."""


def _compile_and_link(inputs: KeyInputs, compiler: Compiler, linker_path: str, linker: str) -> tuple[Build, bytes]:
    """How it was built, and the linked object's bytes."""
    key, label = inputs.key(), f"{inputs.spec.label()} for {inputs.arch}"
    kernel_id = inputs.spec.kernel_id
    if compiler is compile_object and _loaded_sources.setdefault(kernel_id, inputs.sources_digest) != inputs.sources_digest:
        raise CompileFailed(f"{label}: the kernel's sources changed after this process loaded them", hint="start a new process")
    sweep_scratch()
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
    try:
        exported, linked = scratch / "object.o", scratch / "object.so"
        try:
            dynamic_smem_bytes = compiler(inputs.spec, inputs.arch, symbol_for(key), inputs.toolchain.flavour, exported)
        except MlactlError:
            raise
        except Exception as error:
            raise CompileFailed(f"{label}: {type(error).__name__}: {error}") from error
        if not exported.is_file() or exported.stat().st_size == 0:
            raise CompileFailed(f"{label}: the compiler reported success and wrote nothing")
        if registry.sources_digest(kernel_id) != inputs.sources_digest:
            raise CompileFailed(f"{label}: the kernel's sources changed while it was being compiled", hint="run it again")
        _link(linker_path, exported, linked, label)
        build = Build(
            code_sha256=hashlib.sha256(exported.read_bytes()).hexdigest(),
            linker=linker,
            compile_s=time.monotonic() - started,
            dynamic_smem_bytes=dynamic_smem_bytes,
        )
        return build, linked.read_bytes()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sweep_scratch() -> None:
    """Removes this user's scratch folders that killed compiles left; one is in use for seconds, so an hour old is left."""
    oldest = time.time() - 3600
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*"):
        try:
            info = folder.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and info.st_mtime < oldest:
            shutil.rmtree(folder, ignore_errors=True)


def _link(linker_path: str, exported: Path, linked: Path, label: str) -> None:
    """Links without start files and by bare names: no path of this machine gets into the object."""
    command = [linker_path, *LINK_FLAGS, "-o", linked.name, exported.name]
    environment = {name: value for name, value in os.environ.items() if name not in _LINKER_VARIABLES}
    ran = subprocess.run(command, cwd=exported.parent, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode != 0 or not linked.is_file():
        raise CompileFailed(f"{label}: ld failed with exit code {ran.returncode}: {ran.stderr.strip()[:500]}")


# ---- writing


@contextmanager
def _temporary(bucket: str, key: str, data: bytes, mode: int) -> Iterator[str]:
    """A private file beside the entry with this content, flushed to disk; it is gone after an error."""
    path = f"{bucket}/{key}.{os.getpid()}-{secrets.token_hex(4)}{TEMP_SUFFIX}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            os.fchmod(fd, mode)  # whatever the umask
            os.fsync(fd)
        finally:
            os.close(fd)
        yield path
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise


def _make_folder(path: Path, mode: int) -> None:
    try:
        path.mkdir(mode)
    except FileExistsError:
        return
    path.chmod(mode)  # whatever the umask


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turns what the file system says into an error that names path, owner and mode."""
    try:
        yield
    except OSError as error:
        path = error.filename if isinstance(error.filename, str) else str(root)
        hint = "name a root that this user may write: --cache-dir DIR or MLACTL_CACHE_DIR"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space: mlactl cache prune, mlactl cache prune --max-size 1GiB"
        raise CannotRun(f"cannot write {trust.describe(path)}: {error.strerror or error}", hint=hint) from error
