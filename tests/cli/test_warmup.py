"""`mlactl warmup` with real processes: real compiles of tiny kernels, kills, locks, interrupts, every mode and exit code."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from command_line import Cli

from mlactl.cache import elf
from mlactl.cache.entry import Status, examine
from mlactl.cache.store import Store

TINY = Path(__file__).with_name("tiny_warmup.py")
WARMUP = ("warmup", "--profile", "ci-small", "--arch", "sm_120a")


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A cache with the objects of factors 0, 1 and 2, to be copied."""
    cli = Cli(tmp_path_factory.mktemp("warmed"))
    cli.launch = (sys.executable, str(TINY))
    assert cli(*WARMUP).code == 0
    return cli.cache_dir


@pytest.fixture
def warm(tiny, warmed):
    """Fills the test's own cache with the first so many objects."""

    def fill(count):
        shutil.copytree(warmed, tiny.cache_dir)
        for entry in entries(tiny):
            if entry.manifest.spec.fact("factor") >= count:
                entry.object_path.unlink()
                entry.manifest_path.unlink()

    return fill


@pytest.fixture
def tiny(cli):
    """The command line with profiles of three tiny kernels; builders log to `tiny.log`."""
    cli.launch = (sys.executable, str(TINY))
    cli.log = cli.home / "log"
    cli.env |= {"TINY_LOG": str(cli.log), "TINY_COUNT": "3"}
    return cli


def built(cli) -> Counter:
    """How often each factor's builder ran."""
    return Counter(int(line.split()[0]) for line in cli.log.read_text().splitlines()) if cli.log.exists() else Counter()


def entries(cli):
    return list(Store.open(str(cli.cache_dir)).entries())


def assert_valid(cli, count):
    """The cache holds `count` entries, each right down to its machine code, and nothing else."""
    found = entries(cli)
    assert [entry.status for entry in map(examine, found)] == [Status.OK] * count


def wait_for(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "Z"


def alive_in_session(session):
    """The processes of the session that can still write: zombies do not count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def statuses(done):
    return [entry["status"] for entry in done.json["entries"]]


# ---- compiling


def test_everything_missing_is_compiled_once_and_then_never_again(tiny):
    first = tiny(*WARMUP, "--json")
    assert first.code == 0, first.stderr
    assert statuses(first) == ["compiled"] * 3
    assert [entry["spec"]["facts"]["factor"] for entry in first.json["entries"]] == [0, 1, 2]
    assert (first.json["complete"], first.json["profile"], first.json["arches"]) == (True, "ci-small", ["sm_120a"])
    assert_valid(tiny, 3)
    second = tiny.every_mode(*WARMUP)
    assert second["human"].stdout == "3 already there\n"
    assert second["quiet"].stdout == ""
    assert statuses(second["json"]) == ["present"] * 3
    assert built(tiny) == {0: 1, 1: 1, 2: 1}


def test_keys_compiled_are_printed_for_pipes_and_people_get_counts(tiny, warm):
    warm(1)
    (there,) = entries(tiny)
    done = tiny(*WARMUP, "-q")
    assert (done.code, done.stderr) == (0, "")
    assert sorted([*done.lines, there.key]) == sorted(entry.key for entry in entries(tiny))
    tiny.env["TINY_COUNT"] = "4"
    done = tiny(*WARMUP)
    assert done.stdout.startswith("1 compiled in ")
    assert done.stdout.endswith(" s, 3 already there\n")
    assert done.stderr.splitlines()[0] == "compiling: 0/1 kernels"


def test_every_arch_asked_for_gets_its_own_object(tiny):
    done = tiny("warmup", "--profile", "ci-small", "--arch", "sm_121a", "--arch", "sm_120a", "--arch", "sm_121a", "--json", env={"TINY_COUNT": "1"})
    assert done.code == 0
    assert [(entry["arch"], entry["status"]) for entry in done.json["entries"]] == [("sm_121a", "compiled"), ("sm_120a", "compiled")]
    assert sorted(elf.inspect(entry.object_path.read_bytes()).arch for entry in entries(tiny)) == ["sm_120a", "sm_121a"]


@pytest.mark.parametrize(("how", "arch", "other"), [("spawned", "sm_120a", "sm_90a"), ("forked", "sm_121a", "sm_120a")])
def test_an_arch_in_the_environment_does_not_change_what_is_compiled(tiny, how, arch, other):
    """CUTE_DSL_ARCH of one shell made objects of that arch, filed under the arch that was asked for (case C10)."""
    env = {"CUTE_DSL_ARCH": other, "TINY_COUNT": "1"}
    arguments = ("--forked", arch) if how == "forked" else ("warmup", "--profile", "ci-small", "--arch", arch)
    done = tiny(*arguments, env=env)
    assert done.code == 0, done.stderr
    (entry,) = entries(tiny)
    assert elf.inspect(entry.object_path.read_bytes()).arch == arch
    assert entry.manifest.arch == arch


def test_a_cache_warmed_for_one_rank_serves_every_other(tiny, tmp_path):
    """Keys with a rank, a host or a home folder in them compiled everything again on each of eight ranks (cases C2, C7)."""
    first = {"RANK": "0", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0", "HOSTNAME": "node-a", "PYTHONHASHSEED": "1", "POD_NAME": "a"}
    assert tiny(*WARMUP, env=first).code == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tiny.cache_dir.rename(elsewhere / "moved")
    other = {"RANK": "3", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3", "HOSTNAME": "node-b", "PYTHONHASHSEED": "2", "HOME": str(elsewhere)}
    done = tiny(*WARMUP, "--check", env={**other, "MLACTL_CACHE_DIR": str(elsewhere / "moved")}, cwd=elsewhere)
    assert (done.code, done.stdout) == (0, "3 of 3 objects are there\n")


def test_a_module_in_the_working_directory_is_not_imported_by_workers(cli, tmp_path):
    """`python -m` puts the working directory first on the path: a stray msgspec.py there ran inside every worker."""
    from mlactl.warmup.pool import WORKER_COMMAND

    (tmp_path / "msgspec.py").write_text("raise SystemExit('the wrong module')")
    settings = json.dumps({"cache_dir": None, "shared": False}) + "\n"
    done = subprocess.run(WORKER_COMMAND, input=settings, cwd=tmp_path, env=cli.env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_shared_makes_the_cache_readable_for_a_server_of_another_user(tiny):
    done = tiny(*WARMUP, "--shared", env={"TINY_COUNT": "1"})
    assert done.code == 0
    # pytest's own folders are closed to others, which makes this root no use to them either.
    assert f"warning: {tiny.cache_dir} is shared, but " in done.stderr
    (entry,) = entries(tiny)
    assert [path.stat().st_mode & 0o777 for path in (tiny.cache_dir, entry.object_path.parent)] == [0o755, 0o755]
    assert [path.stat().st_mode & 0o777 for path in (entry.object_path, entry.manifest_path)] == [0o644, 0o644]


def test_without_shared_a_new_cache_is_private(tiny):
    assert tiny(*WARMUP, env={"TINY_COUNT": "1"}).code == 0
    assert tiny.cache_dir.stat().st_mode & 0o777 == 0o700


def test_cache_dir_option_beats_the_environment(tiny, tmp_path):
    assert tiny(*WARMUP, "--cache-dir", tmp_path / "other", env={"TINY_COUNT": "1"}).code == 0
    assert not tiny.cache_dir.exists()
    assert len(list(Store.open(str(tmp_path / "other")).entries())) == 1


@pytest.mark.parametrize(
    "damage",
    [lambda path: path.unlink(), lambda path: path.write_bytes(b""), lambda path: os.truncate(path, 4096), "flip", "swap"],
    ids=["unlinked", "emptied", "cut", "flip", "swap"],
)
def test_a_damaged_object_is_named_by_check_and_rebuilt(tiny, warm, damage):
    warm(2)
    victim, other = (entry.object_path for entry in entries(tiny))
    if damage == "flip":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif damage == "swap":
        victim.write_bytes(other.read_bytes())
    else:
        damage(victim)
    check = tiny(*WARMUP, "--check", "-q", env={"TINY_COUNT": "2"})
    assert (check.code, check.stdout) == (1, f"{victim.stem}\n")
    done = tiny(*WARMUP, "-q", env={"TINY_COUNT": "2"})
    assert (done.code, done.stdout) == (0, f"{victim.stem}\n")
    assert_valid(tiny, 2)


# ---- failures


def test_one_failing_kernel_fails_the_run_and_keeps_the_others(tiny):
    done = tiny(*WARMUP, env={"TINY_FAIL": "1"})
    assert done.code == 1
    assert "error: test.tiny 1 dtype=f32 factor=1 for sm_120a: RuntimeError: no code for factor 1\n" in done.stderr
    assert done.stdout.startswith("2 compiled in ")
    assert done.stdout.endswith(" s, 1 failed\n")
    assert_valid(tiny, 2)
    again = tiny(*WARMUP, "--json")
    assert again.code == 0
    assert sorted(statuses(again)) == ["compiled", "present", "present"]


def test_a_failing_kernel_in_every_mode(tiny, warm):
    warm(2)
    done = tiny.every_mode(*WARMUP, code=1, env={"TINY_FAIL": "2"})
    failed = next(entry for entry in done["json"].json["entries"] if entry["status"] == "failed")
    assert failed["reason"] == "test.tiny 1 dtype=f32 factor=2 for sm_120a: RuntimeError: no code for factor 2"
    assert done["json"].json["complete"] is False
    assert all("no code for factor 2" in result.stderr for result in done.values())


def test_a_worker_killed_for_memory_is_named_and_the_rest_goes_on(tiny):
    """An executor breaks as a whole when one worker dies, and does not know what it was compiling; a plain pool hangs."""
    done = tiny(*WARMUP, "--jobs", "1", "--json", env={"TINY_DIE": "0"})
    assert done.code == 1
    assert statuses(done) == ["failed", "compiled", "compiled"]
    assert done.json["entries"][0]["reason"] == (
        "test.tiny 1 dtype=f32 factor=0 for sm_120a: the compile worker was killed by SIGKILL, as the kernel does when memory runs out: "
        "try fewer --jobs; it last said: about to run out of memory"
    )
    assert_valid(tiny, 2)


def test_an_export_that_writes_nothing_is_a_failure(tiny):
    """A compiler that returned 0 without a file was reported as a warmed cache (case C9)."""
    done = tiny(*WARMUP, env={"TINY_EMPTY": "0", "TINY_COUNT": "1"})
    assert done.code == 1
    assert "factor=0 for sm_120a: the export reported success and wrote nothing" in done.stderr
    assert entries(tiny) == []


def test_kernels_that_are_not_built_yet_are_named_while_the_rest_is_compiled(tiny):
    """A warmup that stops at the first kernel of a later release leaves a node that could serve without anything."""
    done = tiny(*WARMUP, "--json", env={"TINY_UNBUILT": "1", "TINY_COUNT": "1"})
    assert done.code == 1
    assert statuses(done) == ["compiled", "not-built", "not-built"]
    assert done.stderr.splitlines()[0].startswith("error: attention.mla.sm120.decode 18 ")
    assert done.stderr.splitlines()[0].endswith(" for sm_120a: not built yet")
    check = tiny(*WARMUP, "--check", env={"TINY_UNBUILT": "1", "TINY_COUNT": "1"})
    assert check.code == 1
    assert check.lines[-1] == "1 of 3 objects are there, 2 not built yet"


@pytest.mark.parametrize(
    ("env", "error"),
    [
        ({"TINY_NO_COMPILER": "1"}, "error: no compiler here: nvidia-cutlass-dsl is not installed"),
        ({"PATH": "/nonexistent"}, "error: no linker: ld is not in PATH, and objects are linked with it"),
    ],
    ids=["compiler", "linker"],
)
def test_without_compiler_or_linker_the_exit_code_is_3(tiny, env, error):
    done = tiny(*WARMUP, env=env)
    assert (done.code, done.stdout) == (3, "")
    assert error in done.stderr.splitlines()
    assert entries(tiny) == []


def test_nothing_missing_needs_no_linker_and_no_worker(tiny, warm):
    warm(3)
    done = tiny(*WARMUP, env={"PATH": "/nonexistent"})
    assert (done.code, done.stdout, done.stderr) == (0, "3 already there\n", "")
    assert not tiny.log.exists()


@pytest.mark.parametrize(
    ("arguments", "stderr"),
    [
        (("--check", "--dry-run"), "error: --check and --dry-run were both given"),
        (("--jobs", "0"), "error: invalid value for '--jobs' / '-j'"),
        (("--scales", "/nonexistent/scales.json"), "error: /nonexistent/scales.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_usage_errors_exit_2(tiny, arguments, stderr):
    profile = "glm-5.2-tp4-dcp4" if arguments[0] == "--scales" else "ci-small"
    done = tiny("warmup", "--profile", profile, "--arch", "sm_120a", *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith(stderr)


def test_an_unknown_profile_exits_2(tiny):
    done = tiny("warmup", "--profile", "ci-smal", "--check")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no profile named 'ci-smal', did you mean ci-small?\n")


def test_heads_that_do_not_divide_exit_2_naming_both_numbers(tiny, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(
        (Path(__file__).parents[2] / "profiles" / "ci-small.toml").read_text().replace("heads = 8", "heads = 64").replace("tp = 1", "tp = 3")
    )
    done = tiny("warmup", "--profile", path, "--check")
    assert done.code == 2
    assert done.stderr.startswith(f"error: {path}: model.heads: 64 heads do not divide over parallel.tp = 3 ranks\n")


def test_a_root_that_cannot_be_written_exits_2_naming_it(tiny, tmp_path):
    """A file in the place of the root: nobody can write that, root included."""
    (tmp_path / "file").write_text("")
    done = tiny(*WARMUP, "--cache-dir", tmp_path / "file" / "cache", env={"TINY_COUNT": "2"})
    assert done.code == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert str(tmp_path / "file") in errors[0]


# ---- looking only


def test_dry_run_lists_everything_and_compiles_nothing(tiny):
    done = tiny.every_mode(*WARMUP, "--dry-run", rows="entries")
    assert statuses(done["json"]) == ["missing"] * 3
    keys = [entry["key"] for entry in done["json"].json["entries"]]
    assert done["quiet"].lines == keys
    assert [line.split()[:3] for line in done["human"].lines[1:]] == [["missing", "sm_120a", key[:12]] for key in keys]
    assert done["human"].stderr.splitlines()[-1] == "0 of 3 objects are there, 3 missing; nothing was compiled"
    assert not tiny.cache_dir.exists()
    assert not tiny.log.exists()


def test_check_names_what_is_missing_and_exits_1_in_every_mode(tiny, warm):
    warm(1)
    done = tiny.every_mode(*WARMUP, "--check", code=1)
    rows = done["json"].json["entries"]
    assert [entry["status"] for entry in rows] == ["present", "missing", "missing"]
    assert done["quiet"].lines == [entry["key"] for entry in rows[1:]]
    assert done["human"].lines == [
        f"missing: test.tiny 1 dtype=f32 factor=1 for sm_120a: not in {tiny.cache_dir}",
        f"missing: test.tiny 1 dtype=f32 factor=2 for sm_120a: not in {tiny.cache_dir}",
        "1 of 3 objects are there, 2 missing",
    ]
    assert done["human"].stderr == "hint: mlactl warmup --profile ci-small --arch sm_120a\n"
    assert built(tiny) == {}


def test_check_of_a_warm_cache_exits_0_in_every_mode(tiny, warm):
    warm(3)
    done = tiny.every_mode(*WARMUP, "--check")
    assert done["human"].stdout == "3 of 3 objects are there\n"
    assert done["quiet"].stdout == ""
    assert done["json"].json["complete"] is True


def test_without_a_gpu_or_an_arch_the_default_is_said(tiny):
    from mlactl.warmup.arches import present_arches

    done = tiny("warmup", "--profile", "ci-small", "--dry-run")
    expected = present_arches()
    note = (
        f"for the GPU of this machine: {', '.join(expected)}"
        if expected
        else "no GPU here that objects are made for, so for sm_120a; --arch says otherwise"
    )
    assert done.stderr.splitlines()[0] == note


# ---- kills, interrupts, many at once


def test_kill_9_in_the_middle_leaves_a_valid_cache_and_the_next_run_does_the_rest(tiny):
    env = {"TINY_COUNT": "4", "TINY_SLOW_S": "0.2"}
    process = tiny.start(*WARMUP, "--jobs", "2", env=env)
    wait_for(lambda: sum(entry.status is Status.OK for entry in entries(tiny)) >= 1)
    process.kill()
    process.communicate()
    # Workers notice that nobody reads their answers, finish the kernel they are at and end.
    workers = {int(line.split()[1]) for line in tiny.log.read_text().splitlines()}
    wait_for(lambda: all(gone(pid) for pid in workers))
    done_before = len(entries(tiny))
    assert 1 <= done_before < 4
    assert_valid(tiny, done_before)
    resumed = tiny(*WARMUP, "--json", env=env)
    assert resumed.code == 0
    assert Counter(statuses(resumed)) == {"present": done_before, "compiled": 4 - done_before}
    assert_valid(tiny, 4)


def test_kill_9_of_everything_leaves_a_valid_cache_and_the_next_run_does_the_rest(tiny):
    env = {"TINY_COUNT": "4", "TINY_SLOW_S": "0.2"}
    process = tiny.start(*WARMUP, "--jobs", "2", env=env, start_new_session=True)
    wait_for(lambda: sum(entry.status is Status.OK for entry in entries(tiny)) >= 1)
    # The session, not the workers that the log names: one that has not begun its first compile is not in it yet.
    while alive := alive_in_session(process.pid):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.communicate()
    done_before = sum(entry.status is Status.OK for entry in entries(tiny))
    resumed = tiny(*WARMUP, "--json", env=env)
    assert resumed.code == 0
    assert Counter(statuses(resumed)) == {"present": done_before, "compiled": 4 - done_before}
    assert_valid(tiny, 4)


@pytest.mark.parametrize("mode", ["human", "json"])
def test_ctrl_c_says_what_was_finished_and_leaves_a_valid_cache(tiny, mode):
    """Ctrl-C reached the workers too, which printed a traceback each and left the count unknown."""
    env = {"TINY_COUNT": "6", "TINY_SLOW_S": "0.5"}
    process = tiny.start(*WARMUP, "--jobs", "2", "--output", mode, env=env, start_new_session=True)
    wait_for(lambda: sum(entry.status is Status.OK for entry in entries(tiny)) >= 2)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    # A worker that does not unwind in time is killed, and a killed writer leaves a temporary or an uncommitted object.
    found = Counter(entry.status for entry in map(examine, entries(tiny)))
    finished = found.pop(Status.OK)
    assert 2 <= finished < 6
    assert set(found) <= {Status.TEMP, Status.NO_MANIFEST}
    assert stderr.splitlines()[-2:] == [
        f"interrupted: {finished} of 6 missing objects were compiled and are in the cache",
        "hint: mlactl warmup --profile ci-small --arch sm_120a takes up the rest",
    ]
    if mode == "json":
        document = json.loads(stdout)
        assert document["interrupted"] is True
        assert Counter(entry["status"] for entry in document["entries"]) == {"compiled": finished, "missing": 6 - finished}
    workers = {int(line.split()[1]) for line in tiny.log.read_text().splitlines()}
    wait_for(lambda: all(gone(pid) for pid in workers), seconds=20)
    assert tiny(*WARMUP, env=env).code == 0
    assert_valid(tiny, 6)


def test_sigterm_says_what_was_finished_and_leaves_a_valid_cache(tiny):
    """A service manager's stop ended the run without a word and left its workers to finish unseen."""
    env = {"TINY_COUNT": "6", "TINY_SLOW_S": "0.5"}
    process = tiny.start(*WARMUP, "--jobs", "2", "--cache-dir", tiny.cache_dir, env=env)
    wait_for(lambda: sum(entry.status is Status.OK for entry in entries(tiny)) >= 1)
    process.terminate()
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 143
    finished = sum(entry.status is Status.OK for entry in map(examine, entries(tiny)))
    assert stderr.splitlines()[-2:] == [
        f"stopped by SIGTERM: {finished} of 6 missing objects were compiled and are in the cache",
        f"hint: mlactl warmup --cache-dir {tiny.cache_dir} --profile ci-small --arch sm_120a takes up the rest",
    ]
    workers = {int(line.split()[1]) for line in tiny.log.read_text().splitlines()}
    wait_for(lambda: all(gone(pid) for pid in workers), seconds=20)


def test_a_folder_in_an_objects_place_is_named(tiny, warm):
    """The rename over it failed with the temporary's name and `Is a directory`, after everything was compiled."""
    warm(2)
    bad, other = entries(tiny)
    bad.object_path.unlink()
    bad.object_path.mkdir()
    before = built(tiny)
    done = tiny(*WARMUP, env={"TINY_COUNT": "2"})
    assert done.code == 2
    assert (
        f"error: {bad.object_path} is a directory, expected a regular file or nothing\nhint: ls -ld {bad.object_path}; move it away\n" in done.stderr
    )
    assert built(tiny) == before
    assert examine(other).status is Status.OK


def test_looking_lists_every_untrusted_object_and_the_others(tiny, warm):
    """The first object that others could write ended --check and --dry-run, and the missing ones were not told."""
    warm(2)
    first, second = entries(tiny)
    for entry in (first, second):
        entry.object_path.chmod(0o666)
    done = tiny.every_mode(*WARMUP, "--check", "--cache-dir", tiny.cache_dir, code=1)
    assert Counter(statuses(done["json"])) == {"untrusted": 2, "missing": 1}
    assert {row["key"] for row in done["json"].json["entries"]} >= {first.key, second.key}
    stdout, stderr = done["human"].stdout, done["human"].stderr
    for entry in (first, second):
        assert f"{entry.object_path} is not trusted: owner" in stdout
        assert f"hint: chmod go-w {entry.object_path}" in stderr
    assert stdout.endswith("0 of 3 objects are there, 1 missing, 2 not trusted\n")
    assert f"hint: mlactl warmup --cache-dir {tiny.cache_dir} --profile ci-small" in stderr
    assert Counter(statuses(tiny(*WARMUP, "--dry-run", "--json"))) == {"untrusted": 2, "missing": 1}
    real = tiny(*WARMUP)
    assert (real.code, "is not trusted" in real.stderr, tiny.log.exists()) == (2, True, False), "no mode is changed by compiling"


def test_sixteen_warmups_at_a_barrier_compile_each_key_once(tiny, tmp_path):
    """Every pod of a rollout compiled the same kernels at once, and one with a broken compiler published what it had (case C4).

    The broken one holds the first key's lock when it opens the barrier, so that all others find it locked.
    """
    barrier = tmp_path / "barrier"
    started = time.time()
    good = [
        tiny.start(*WARMUP, "--jobs", "1", "--json", env={"TINY_WAIT": str(barrier), "TINY_LOG": str(tmp_path / f"log{number}")})
        for number in range(15)
    ]
    bad = tiny(
        *WARMUP, "--jobs", "1", "--json", env={"TINY_FAIL": "0", "TINY_RELEASE": "0", "TINY_BARRIER": str(barrier), "TINY_LOG": str(tmp_path / "bad")}
    )
    outputs = [process.communicate(timeout=540) for process in good]
    assert [process.returncode for process in good] == [0] * 15, outputs
    assert bad.code == 1
    assert bad.json["entries"][0]["reason"] == "test.tiny 1 dtype=f32 factor=0 for sm_120a: RuntimeError: no code for factor 0"
    documents = [json.loads(stdout) for stdout, _ in outputs]
    for index in range(3):
        states = Counter(document["entries"][index]["status"] for document in [*documents, bad.json])
        assert states["compiled"] == 1, (index, states)
        assert states["failed"] == (1 if index == 0 else 0)
    assert_valid(tiny, 3)
    left = [path for path in tiny.cache_dir.rglob("*") if path.is_file() and path.suffix not in (".so", ".json", ".lock")]
    assert [path for path in left if path.stat().st_mtime < started or path.name.endswith(".tmp")] == []


# ---- scale files


def scale_file(path, scales):
    document = {"format": "nvfp4_ds_mla_outer_scale_v1", "num_layers": len(scales), "latent_dim": 512, "denominator": 2688.0, "scales": scales}
    path.write_text(json.dumps(document))
    return path


def identities(done):
    assert done.code == 0, done.stderr
    return {entry["spec"]["facts"]["latent_scale_identity"] for entry in done.json["entries"] if "latent_scale_identity" in entry["spec"]["facts"]}


@pytest.mark.parametrize(
    ("scales", "needed"),
    [([0.37] * 78, {0, 1}), ([1.0] * 78, {1}), ([1.0] * 77 + [0.5], {0, 1})],
    ids=["all scaled, and a draft layer at 1.0", "all 1.0", "one scaled"],
)
def test_a_scale_file_narrows_the_variants_to_what_its_layers_and_the_draft_layers_need(cli, tmp_path, scales, needed):
    """Draft layers always run with 1.0: a warmup that looked at the file alone left them to compile while serving."""
    arguments = ("warmup", "--profile", "glm-5.2-tp4-dcp4", "--arch", "sm_120a", "--dry-run", "--json")
    assert identities(cli(*arguments)) == {0, 1}
    assert identities(cli(*arguments, "--scales", scale_file(tmp_path / "scales.json", scales))) == needed


def test_the_scale_file_that_a_profile_names_is_used_without_an_option(cli, tmp_path):
    scale_file(tmp_path / "scales.json", [0.37] * 78)
    text = (Path(__file__).parents[2] / "profiles" / "glm-5.2-tp4-dcp4.toml").read_text().replace("draft_layers = 1", "draft_layers = 0")
    (tmp_path / "mine.toml").write_text(text + '\n[scales]\nfile = "scales.json"\n')
    assert identities(cli("warmup", "--profile", tmp_path / "mine.toml", "--arch", "sm_120a", "--dry-run", "--json")) == {0}


def test_a_wrong_scale_file_warms_nothing(cli, tmp_path):
    done = cli("warmup", "--profile", "glm-5.2-tp4-dcp4", "--arch", "sm_120a", "--scales", scale_file(tmp_path / "scales.json", [1.0] * 77))
    assert done.code == 1
    assert "77" in done.stderr
    assert "78" in done.stderr
    assert not cli.cache_dir.exists()


def test_a_scale_file_for_records_without_outer_scales_is_refused(cli, tmp_path):
    done = cli("warmup", "--profile", "ci-small", "--arch", "sm_120a", "--scales", scale_file(tmp_path / "scales.json", [1.0]), "--dry-run")
    assert done.code == 1
    assert "profile ci-small stores bf16, expected nvfp4_ds_mla_432 or nvfp4_ds_mla_368" in done.stderr


def test_keys_are_completed_from_the_cache(tiny, warm):
    warm(3)
    keys = sorted(entry.key for entry in entries(tiny))

    def complete(typed):
        line = f"mlactl cache show {typed}"
        done = tiny(env={"_MLACTL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": "3"})
        assert done.code == 0, done.stderr
        return [line for line in done.lines if line]

    assert complete("") == keys
    assert complete(keys[0][:6]) == [key for key in keys if key.startswith(keys[0][:6])]
    assert complete("zz") == []


def test_a_root_of_b12x_is_not_warmed(tiny):
    """Objects published there would leave a folder that is a cache of both tools, which neither lists any more."""
    key = "ab" * 32
    (tiny.cache_dir / key[:2]).mkdir(parents=True)
    (tiny.cache_dir / key[:2] / f"{key}.o").write_bytes(b"x")
    for more in ((), ("--check",), ("--dry-run",)):
        done = tiny(*WARMUP, *more)
        assert (done.code, done.stdout) == (2, "")
        assert f"{tiny.cache_dir} is a b12x cache, expected one of mlactl's own\n" in done.stderr
        assert "hint: name another root: --cache-dir DIR or MLACTL_CACHE_DIR" in done.stderr
    assert sorted(path.name for path in tiny.cache_dir.iterdir()) == [key[:2]]
