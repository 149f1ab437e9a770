"""Recording calls: what is stored, when it stops, and what a crash leaves behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calls import dense, finished

import mlactl
from mlactl.errors import UsageError
from mlactl.kernels import registry, runtime
from mlactl.replay import capture as captures
from mlactl.replay import oracle, recorder, storage
from mlactl.replay.errors import CaptureRefused
from mlactl.replay.header import Parallel

HERE = Path(__file__).parent


class Binding:
    """A call over a pool of 60 pages, of which it can touch 5; as a kernel's binding looks to a recorder, on the CPU."""

    def __init__(self, seed=0):
        small = finished(dense(seed=seed))
        ids = small.tensors["page_ids"] % 59
        pool = torch.full((60, 16, 600), float("nan"), dtype=torch.bfloat16)
        pool[ids, :, :576] = small.tensors["kv_cache"]
        table = torch.full((2, 8), 39999, dtype=torch.int32)
        live = small.tensors["page_table"]
        table[:, :3] = torch.where(live >= 0, ids[live.long().clamp_min(0)].to(torch.int32), 39998)
        spec = registry.DENSE_FORWARD.spec(**small.call.facts)
        self.plan = SimpleNamespace(forward=spec, caps=SimpleNamespace(mode="verify", rows=4, heads=2))
        wide = torch.zeros(8, 2, 640, dtype=torch.bfloat16)
        wide[..., :576] = small.tensors["q"]
        self.tensors = SimpleNamespace(
            q=wide[..., :576],
            kv_cache=pool,
            page_table=table,
            cache_seqlens=small.tensors["cache_seqlens"],
            cu_seqlens_q=None,
            output=torch.full((8, 2, 512), float("nan"), dtype=torch.bfloat16),
            lse=torch.zeros(8, 2),
            sm_scale=small.call.sm_scale,
        )
        self.small, self.ids = small, ids

    def run(self):
        found = runtime.recorder()
        token = found.before(self) if found is not None else None
        self.tensors.output.copy_(self.small.output)
        self.tensors.lse.copy_(self.small.lse)
        if found is not None:
            found.after(token, self.tensors.output, self.tensors.lse)
        return self.tensors.output, self.tensors.lse


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_call_is_stored_with_only_the_pages_it_can_touch(tmp_path):
    binding = Binding()
    with mlactl.capture(tmp_path, profile="demo"):
        binding.run()
    assert runtime.recorder() is None
    assert names(tmp_path) == ["000000-verify.in.safetensors", "000000-verify.out.safetensors", "index.jsonl"]
    found = captures.read(tmp_path / "000000-verify")
    assert found.tensors["page_ids"].tolist() == sorted(binding.ids.tolist())
    assert found.tensors["kv_cache"].shape == (5, 16, 576)
    assert not found.tensors["kv_cache"].isnan().any()
    assert found.tensors["page_table"][:, 3:].eq(-1).all()
    assert found.call.profile == "demo"
    assert (found.facts["q"].strides, found.facts["kv_cache"].shape) == ((1280, 640, 1), (60, 16, 600))
    expected = oracle.reference(binding.small, "fp64", device="cpu")
    again = oracle.reference(found, "fp64", device="cpu")
    assert torch.equal(again[0], expected[0])
    assert torch.equal(found.output, binding.small.output)


def test_two_captures_of_one_call_are_byte_identical(tmp_path):
    for place in ("a", "b"):
        with mlactl.capture(tmp_path / place):
            Binding().run()
    for name in ("000000-verify.in.safetensors", "000000-verify.out.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_later_runs_and_ranks_take_other_names(tmp_path):
    for rank in (0, 1):
        for _ in range(2):
            with mlactl.capture(tmp_path, parallel=Parallel(dcp_rank=rank, dcp_world=2)):
                Binding().run()
    assert [path.name for path in captures.find([tmp_path])] == [
        f"00000{number}-verify-dcp{rank}.in.safetensors" for number in (0, 1) for rank in (0, 1)
    ]


def test_a_killed_launch_keeps_its_inputs(tmp_path):
    """Outputs were written together with inputs at the end, so that the call that crashed was the one not recorded."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import os, signal, mlactl; from test_recorder import Binding\n"
        "binding = Binding()\n"
        "binding.tensors.output = type('Dies', (), {'copy_': lambda self, value: os.kill(os.getpid(), signal.SIGKILL)})()\n"
        "with mlactl.capture(sys.argv[2]): binding.run()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(HERE), str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert names(tmp_path) == ["000000-verify.in.safetensors"]
    found = captures.read(tmp_path / "000000-verify")
    assert found.output is None
    assert found.rows == 8


def test_the_index_line_comes_last(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(recorder.storage, "append_status", lambda folder, fields: seen.append((names(folder), fields["status"])))
    with mlactl.capture(tmp_path):
        Binding().run()
    assert seen == [(["000000-verify.in.safetensors", "000000-verify.out.safetensors"], "complete")]


def test_recording_stops_after_the_limit_of_calls(tmp_path):
    with mlactl.capture(tmp_path, max_count=2) as found:
        for _ in range(5):
            Binding().run()
    assert found.count == 2
    assert len(captures.find([tmp_path])) == 2
    assert len((tmp_path / "index.jsonl").read_text().splitlines()) == 2


def test_recording_stops_before_the_limit_of_bytes(tmp_path):
    with mlactl.capture(tmp_path, max_bytes=200_000) as found:
        Binding().run()
        with pytest.warns(RuntimeWarning, match="200,000 bytes would be passed"):
            Binding().run()
        Binding().run()
    assert found.written_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) <= 200_000
    assert found.count == 1


def test_the_limit_of_bytes_counts_outputs_before_they_are_there(tmp_path):
    """Inputs under the limit were written, and the outputs after them passed it."""
    binding = Binding()
    with mlactl.capture(tmp_path / "free"):
        binding.run()
    inputs = (tmp_path / "free" / "000000-verify.in.safetensors").stat().st_size
    whole = sum(path.stat().st_size for path in (tmp_path / "free").glob("*.safetensors"))
    with mlactl.capture(tmp_path / "tight", max_bytes=inputs + 16_000), pytest.warns(RuntimeWarning, match="would be passed"):
        binding.run()
    assert names(tmp_path / "tight") == []
    with mlactl.capture(tmp_path / "roomy", max_bytes=whole + recorder.HEADERS_BYTES) as found:
        binding.run()
    assert found.written_bytes == whole


# ---- recording never stops or changes a launch


def test_a_kind_of_call_that_captures_do_not_know_is_told_once(tmp_path):
    """It raised inside the launch."""
    unknown = SimpleNamespace(tensors=SimpleNamespace())
    with mlactl.capture(tmp_path) as found:
        with pytest.warns(RuntimeWarning, match="calls of SimpleNamespace are not recorded yet") as told:
            assert [found.before(unknown) for _ in range(3)] == [None] * 3
        assert len(told) == 1
        Binding().run()
    assert found.count == 1


@pytest.mark.parametrize("broken", ["describe", "inputs_header", "outputs_header"])
def test_whatever_breaks_in_the_recorder_is_one_warning(tmp_path, monkeypatch, broken):
    def fault(*arguments):
        raise ZeroDivisionError("integer modulo by zero")

    monkeypatch.setattr(recorder, broken, fault)
    binding = Binding()
    with mlactl.capture(tmp_path) as found, pytest.warns(RuntimeWarning, match="stopped: ZeroDivisionError: integer modulo by zero") as told:
        outputs = [binding.run()[0] for _ in range(2)]
    assert len(told) == 1
    assert all(torch.equal(output, binding.small.output) for output in outputs)
    assert found.failed == "ZeroDivisionError: integer modulo by zero"


def test_a_warning_that_is_an_error_is_logged_instead(tmp_path, monkeypatch, caplog):
    """Under -W error the warning itself stopped the launch."""
    monkeypatch.setattr(recorder, "describe", lambda *arguments: 1 / 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mlactl.capture(tmp_path):
            Binding().run()
    assert [record.message for record in caplog.records] == [f"recording into {tmp_path} stopped: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("folder", ["/proc/nope", "/dev/null/x", "a\0b"])
def test_a_folder_that_cannot_be_made_stops_recording_and_nothing_else(folder):
    """Opening the runtime of a serving process raised FileNotFoundError."""
    with pytest.warns(RuntimeWarning, match="recording into .* stopped: "):
        found = recorder.from_environment({"MLACTL_CAPTURE_DIR": folder})
    binding = Binding()
    previous = runtime.record_with(found)
    try:
        output, _ = binding.run()
    finally:
        runtime.record_with(previous)
    assert torch.equal(output, binding.small.output)
    assert found.count == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": 0}, "captures over 0 layers: at least 1 is needed"),
        ({"max_count": -1}, "max_count is -1, expected at least 1"),
        ({"max_count": 0}, "max_count is 0, expected at least 1: nothing would be recorded"),
        ({"max_bytes": 0}, "max_bytes is 0, expected at least 1"),
        ({"max_count": "3"}, "max_count is '3', expected a whole number"),
        ({"max_bytes": 1e9}, "max_bytes is 1000000000.0, expected a whole number"),
        ({"layers": True}, "layers is True, expected a whole number"),
        ({"include": "attention.dense_mla.*:verify"}, r"include is 'attention.dense_mla.\*:verify', expected a list of patterns"),
        ({"exclude": "*:decode"}, r"exclude is '\*:decode', expected a list of patterns"),
        ({"include": [3]}, r"include is \[3\], expected a list of patterns"),
        ({"parallel": Parallel(dcp_rank=9, dcp_world=2)}, "captures of DCP rank 9 of 2, expected a rank"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_asked_for(tmp_path, options, words):
    """Layers of 0 were a ZeroDivisionError inside the launch."""
    with pytest.raises(UsageError, match=words), mlactl.capture(tmp_path, **options):
        pass


@pytest.mark.parametrize(
    ("include", "exclude", "count"),
    [((), (), 1), (("*:verify",), (), 1), (("*:decode",), (), 0), (("attention.dense_mla.*",), ("*:verify",), 0), ((), ("attention.mla.*",), 1)],
)
def test_filters(tmp_path, include, exclude, count):
    with mlactl.capture(tmp_path, include=include, exclude=exclude) as found:
        Binding().run()
    assert found.count == count


def test_graph_capture_is_not_recorded_and_replays_are_snapshots(tmp_path, monkeypatch):
    """Recording inside a CUDA-graph capture stored whatever the buffers held before the first replay; refusing it broke the capture."""
    binding = Binding()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with mlactl.capture(tmp_path) as found:
        with pytest.warns(RuntimeWarning, match="CUDA graph is being captured.* recorder.snapshot") as told:
            outputs = [binding.run()[0] for _ in range(2)]
        assert len(told) == 1
        assert all(torch.equal(output, binding.small.output) for output in outputs)
        with pytest.raises(CaptureRefused, match="CUDA graph is being captured"):
            found.snapshot(binding)
    assert names(tmp_path) == []
    assert found.failed is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    binding.run()  # as a replay would: nobody is asked
    found.snapshot(binding)
    assert torch.equal(captures.read(tmp_path / "000000-verify").output, binding.small.output)


def test_a_full_disk_stops_recording_and_not_the_launch(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    binding = Binding()
    monkeypatch.setattr(storage.os, "fsync", full)
    with mlactl.capture(tmp_path) as found:
        with pytest.warns(RuntimeWarning, match="No space left"):
            output, _ = binding.run()
        binding.run()
    assert torch.equal(output, binding.small.output)
    assert "No space left" in found.failed
    assert names(tmp_path) == []


def test_layers_are_counted_over_calls_and_not_over_captures(tmp_path):
    with mlactl.capture(tmp_path, layers=3, max_count=5):
        for _ in range(5):
            Binding().run()
    assert [captures.read(path).call.layer for path in captures.find([tmp_path])] == [0, 1, 2, 0, 1]


def test_what_recorded_before_records_again(tmp_path):
    outer = recorder.Recorder(tmp_path / "outer")
    previous = runtime.record_with(outer)
    try:
        with mlactl.capture(tmp_path / "inner"):
            Binding().run()
        assert runtime.recorder() is outer
    finally:
        runtime.record_with(previous)
    assert outer.count == 0


def test_the_environment_configures_a_recorder(tmp_path):
    assert recorder.from_environment({}) is None
    found = recorder.from_environment(
        {
            "MLACTL_CAPTURE_DIR": str(tmp_path / "made"),
            "MLACTL_CAPTURE_MAX_COUNT": "7",
            "MLACTL_CAPTURE_MAX_BYTES": "1000",
            "MLACTL_CAPTURE_INCLUDE": "a*, b*",
            "MLACTL_CAPTURE_PROFILE": "p",
            "MLACTL_CAPTURE_PARALLEL": "tp=1/2,dcp=3/4,interleave=16",
            "MLACTL_CAPTURE_LAYERS": "78",
        }
    )
    assert found.folder.is_dir()
    assert found.limits == recorder.Limits(7, 1000, ("a*", "b*"))
    assert (found.profile, found.parallel, found.layers) == ("p", Parallel(1, 2, 3, 4, 16), 78)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MAX_COUNT", "many", "MLACTL_CAPTURE_MAX_COUNT=many is not a whole number"),
        ("MAX_COUNT", "²", "MLACTL_CAPTURE_MAX_COUNT=² is not a whole number"),
        ("MAX_BYTES", "9" * 5000, "of at most 18 digits"),
        ("MAX_COUNT", "0", "MLACTL_CAPTURE_MAX_COUNT=0: at least 1 is needed"),
        ("MAX_BYTES", "0", "MLACTL_CAPTURE_MAX_BYTES=0: at least 1 is needed"),
        ("LAYERS", "0", "MLACTL_CAPTURE_LAYERS=0: at least 1 is needed"),
        ("MAXCOUNT", "3", "MLACTL_CAPTURE_MAXCOUNT is no setting of a recording"),
        ("PARALLEL", "dcp=3", "dcp=3 is not understood"),
        ("PARALLEL", "dcp=9/2", "MLACTL_CAPTURE_PARALLEL=dcp=9/2: DCP rank 9 of 2"),
        ("PARALLEL", "tp=9/2", "MLACTL_CAPTURE_PARALLEL=tp=9/2: TP rank 9 of 2"),
        ("PARALLEL", "tp=0/0,interleave=0", "TP rank 0 of 0"),
        ("PARALLEL", "interleave=0", "MLACTL_CAPTURE_PARALLEL=interleave=0: interleave 0"),
    ],
)
def test_values_of_the_environment_that_make_no_sense(tmp_path, name, value, words):
    with pytest.raises(UsageError, match=words):
        recorder.from_environment({"MLACTL_CAPTURE_DIR": str(tmp_path), f"MLACTL_CAPTURE_{name}": value})


def test_an_unknown_variable_names_the_one_that_was_meant(tmp_path):
    """MLACTL_CAPTURE_MAXCOUNT was ignored in silence, and the recording went on to its 100 captures."""
    with pytest.raises(UsageError) as refused:
        recorder.from_environment({"MLACTL_CAPTURE_DIR": str(tmp_path), "MLACTL_CAPTURE_MAXCOUNT": "3"})
    assert refused.value.hint == "MLACTL_CAPTURE_MAX_COUNT, or unset it"
    assert recorder.from_environment({"MLACTL_CAPTURE_MAXCOUNT": "3"}) is None


def test_opening_the_runtime_records_where_the_environment_says(tmp_path, monkeypatch):
    from mlactl.opening import open_runtime

    monkeypatch.setenv("MLACTL_CAPTURE_DIR", str(tmp_path / "captures"))
    try:
        open_runtime(str(tmp_path / "cache"))
        Binding().run()
    finally:
        runtime.configure(None)
    (line,) = (tmp_path / "captures" / "index.jsonl").read_text().splitlines()
    assert json.loads(line)["status"] == "complete"


def test_selected_slots_are_renumbered(tmp_path):
    pool = torch.randint(0, 256, (30, 16, 432), dtype=torch.uint8)
    indices = torch.tensor([[16 * 9 + 3, -1, 16 * 20 + 1, 999999], [16 * 9 + 4, 16 * 2, 7777777, 8888888]], dtype=torch.int32)
    spec = registry.SPARSE_DECODE.spec(tile="heads16", output="split", q_dtype="bf16", record="nvfp4_ds_mla_432", latent_scale_identity=0)
    call = SimpleNamespace(
        plan=SimpleNamespace(forward=spec, caps=SimpleNamespace(mode="decode")),
        tensors=SimpleNamespace(
            q=torch.zeros(2, 8, 576, dtype=torch.bfloat16),
            kv_cache=pool,
            indices=indices,
            lengths=torch.tensor([3, 2], dtype=torch.int32),
            sm_scale=0.1,
            latent_scale=0.37,
            output=torch.zeros(2, 8, 512, dtype=torch.bfloat16),
            lse=torch.zeros(2, 8),
        ),
    )
    recorder.Recorder(tmp_path).snapshot(call)
    found = captures.read(tmp_path / "000000-decode")
    assert found.tensors["page_ids"].tolist() == [2, 9, 20]
    assert found.tensors["indices"].tolist() == [[16 + 3, -1, 32 + 1, -1], [16 + 4, 0, -1, -1]]
    assert torch.equal(found.tensors["kv_cache"], pool[[2, 9, 20]])
    assert (found.call.latent_scale, found.call.scale_mode) == (0.37, "static")


def test_writing_as_another_user_into_a_closed_folder_is_said():
    """Root writes anywhere, so that the case only shows as somebody else."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    code = (
        "import os, sys, warnings; sys.path.insert(0, sys.argv[1]); import mlactl; from test_recorder import Binding\n"
        "binding = Binding(); os.setgid(65534); os.setuid(65534)\n"
        "with warnings.catch_warnings(record=True):\n"
        "    with mlactl.capture(sys.argv[2]) as found: binding.run()\n"
        "print(found.failed)"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        done = subprocess.run([sys.executable, "-c", code, str(HERE), folder], capture_output=True, text=True, check=True)
        assert "Permission denied" in done.stdout
        assert names(Path(folder)) == []


def test_the_dense_binding_records_its_own_call(tmp_path):
    """The real binding with its launch replaced: what a recorder sees on a card, without one."""
    from mlactl.kernels.mla import dense as kernel
    from mlactl.kernels.mla import planner

    made = finished(dense())
    plan = planner.plan(planner.DenseCaps("verify", 2, 2, 48, 16, 132, "sm_90a", rows=4))
    tensors = kernel.DenseTensors(
        q=made.tensors["q"],
        kv_cache=made.tensors["kv_cache"],
        page_table=made.tensors["page_table"],
        cache_seqlens=made.tensors["cache_seqlens"],
        output=torch.zeros(8, 2, 512, dtype=torch.bfloat16),
        lse=torch.zeros(8, 2),
        scratch=torch.zeros(max(1, plan.scratch_bytes), dtype=torch.uint8),
        sm_scale=made.call.sm_scale,
    )
    kernel.check(plan, tensors)
    order = []

    def launch():
        order.append(names(tmp_path))
        tensors.output.copy_(made.output)
        tensors.lse.copy_(made.lse)

    binding = kernel.DenseBinding(plan, tensors, (), (), launch)
    with mlactl.capture(tmp_path):
        output, _ = binding.run()
    assert order == [["000000-verify.in.safetensors"]]
    assert output is tensors.output
    found = captures.read(tmp_path / "000000-verify")
    assert found.call.spec == plan.forward
    assert torch.equal(found.output, made.output)
    assert found.tensors["cu_seqlens_q"].tolist() == [0, 4, 8]
    binding.run()
    assert len(names(tmp_path)) == 3
