"""`mlactl verify-scales` and `mlactl scales fit` as a person runs them: every output mode, every exit code."""

import json
import os
import pty
import re
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scale_files import amplitudes, gscale, module, scalar, v1, write_json, write_safetensors, write_sharded

GLM = "glm-5.2-tp4-dcp4"


@pytest.fixture
def good(tmp_path):
    return write_json(tmp_path / "good.json", v1())


@pytest.fixture
def bad(tmp_path):
    document = v1(max_abs=None)
    document["scales"][17] = -0.5
    return write_json(tmp_path / "bad.json", document)


@pytest.fixture
def doubtful(tmp_path):
    return write_json(tmp_path / "identity.json", v1(scales=[1.0] * 78, max_abs=None))


def profile_with(cli, scales, sha256=None, layers=78, draft_layers=1):
    """A profile file of its own that names `scales`."""
    shown = cli("profile", "show", GLM, "--json").json["profile"]
    text = Path(shown["path"]).read_text().replace(f'name = "{GLM}"', 'name = "mine"')
    path = cli.home / "mine.toml"
    digest = f'sha256 = "{sha256}"\n' if sha256 else ""
    path.write_text(f'{text}\n[scales]\nfile = "{scales}"\n{digest}')
    return path


def test_a_valid_file_in_every_mode(cli, good):
    done = cli.every_mode("verify-scales", good, rows="files")
    assert done["human"].lines[0] == f"{good}: valid"
    assert "nvfp4_ds_mla_outer_scale_v1; 78 layers, 78 dynamic and 0 identity; needs latent_scale_identity=0; sha256 " in done["human"].stdout
    assert "log2 scale by layer" in done["human"].stdout
    assert done["human"].stderr == ""
    assert done["quiet"].stdout == ""
    (row,) = done["json"].json["files"]
    assert (row["verdict"], row["errors"], row["findings"], row["num_layers"], row["latent_scale_identity"]) == ("valid", 0, [], 78, [0])
    assert row["layers"][77]["max_abs"] == v1()["max_abs"][77]
    assert row["layers"][0]["variant"] == "dynamic"
    assert len(row["sha256"]) == 64


def test_an_invalid_file_in_every_mode(cli, bad):
    done = cli.every_mode("verify-scales", bad, code=1, rows="files")
    assert done["human"].lines[0] == f"{bad}: invalid, 1 error"
    (line,) = [line for line in done["human"].lines if line.startswith("error")]
    assert line.split()[:3] == ["error", "17", "scales"]
    assert "[17]" in line
    assert "-0.5" in line
    assert "above 0" in line
    assert done["quiet"].lines == [str(bad)]
    (row,) = done["json"].json["files"]
    assert (row["verdict"], row["errors"]) == ("invalid", 1)
    (found,) = row["findings"]
    assert {name: found[name] for name in ("severity", "check", "layer", "tensor", "index", "value")} == {
        "severity": "error",
        "check": "not-positive",
        "layer": 17,
        "tensor": "scales",
        "index": [17],
        "value": "-0.5",
    }
    assert row["layers"][17]["scale"] is None


def test_warnings_fail_only_with_strict(cli, doubtful):
    done = cli.every_mode("verify-scales", doubtful, rows="files")
    assert done["human"].lines[0] == f"{doubtful}: valid with 1 warning"
    assert done["quiet"].stdout == ""
    assert done["json"].json["files"][0]["verdict"] == "warnings"
    done = cli.every_mode("verify-scales", doubtful, "--strict", code=1, rows="files")
    assert done["human"].lines[0] == f"{doubtful}: 1 warning, which --strict does not allow"
    assert done["quiet"].lines == [str(doubtful)]


def test_an_unreadable_file_in_every_mode(cli, tmp_path):
    done = cli.every_mode("verify-scales", tmp_path / "absent.json", code=2, rows="files")
    for mode, result in done.items():
        assert result.stderr.splitlines() == [f"error: {tmp_path}/absent.json: no such file or directory", f"hint: ls -ld {tmp_path}/absent.json"], (
            mode
        )
    assert done["human"].lines == [f"{tmp_path}/absent.json: unreadable"]
    assert done["json"].json["files"][0]["verdict"] == "unreadable"
    assert done["quiet"].lines == [f"{tmp_path}/absent.json"]


def test_several_files_the_worst_code_counts(cli, good, bad, doubtful, tmp_path):
    absent = tmp_path / "absent.json"
    assert cli("verify-scales", good, doubtful).code == 0
    assert cli("verify-scales", good, bad).code == 1
    done = cli("verify-scales", good, absent, bad, "--json")
    assert done.code == 2
    assert [row["verdict"] for row in done.json["files"]] == ["valid", "unreadable", "invalid"]
    assert cli("verify-scales", good, absent, bad, "-q").lines == [str(absent), str(bad)]
    human = cli("verify-scales", good, absent, bad)
    assert [line for line in human.lines if line.startswith(str(tmp_path))] == [f"{good}: valid", f"{absent}: unreadable", f"{bad}: invalid, 1 error"]


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        (lambda path: path.mkdir(), 2, "no *.safetensors"),
        (lambda path: path.write_bytes(b""), 1, "the file is empty"),
        (lambda path: path.write_bytes(b"\x00\x01"), 1, "line 1 column 1"),
        (lambda path: os.mkfifo(path), 2, "is a pipe"),
        (lambda path: path.symlink_to(path), 2, "too many levels of symbolic links"),
        (lambda path: path.write_text('{"format": "nvfp4_ds_mla_outer_scale_v2"}'), 1, "known, but its fields are not public"),
    ],
)
def test_odd_paths(cli, tmp_path, make, code, said):
    path = tmp_path / "odd"
    make(path)
    done = cli("verify-scales", path)
    assert done.code == code
    assert said in done.stdout + done.stderr


def test_a_file_without_permission(cli, good, bad):
    """As an unprivileged user, for root reads everything; it drops to nobody once everything is imported."""
    code = (
        "import os, sys; from mlactl.cli.app import main; assert main(['verify-scales', sys.argv[1]]) == 1\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(main(['verify-scales', sys.argv[2]]))"
    )
    for parent in good.parents:
        if parent != parent.parent and os.getuid() == 0 and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    good.chmod(0)
    done = subprocess.run([sys.executable, "-c", code, bad, good], capture_output=True, text=True, env=cli.env)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[0] == f"error: {good}: permission denied"


def test_usage_errors(cli, good, tmp_path):
    for arguments, said in (
        ((), "no file was named"),
        (("--profile", GLM), "names no scale file"),
        ((good, "--profile", "nope"), "no profile named"),
        ((good, good, "--sha256", "0" * 64), "--sha256 pins one file, 2 were named"),
        ((good, "--sha256", "12"), "64 hex digits"),
        ((good, "--plot", tmp_path / "x.pdf"), "ends in .png"),
        ((good, "--json", "-q"), "two output modes"),
        ((good, "--against", tmp_path / "absent"), "no such file"),
    ):
        done = cli("verify-scales", *arguments)
        assert done.code == 2, arguments
        assert said in done.stderr, arguments
        assert done.stderr.count("hint: ") == 1, arguments


def test_layers_table(cli, good, tmp_path):
    done = cli("verify-scales", good, "--layers")
    lines = [line.split() for line in done.lines]
    assert ["layer", "scale", "log2", "max_abs", "variant"] in lines
    assert ["77", "0.0019345237", "-9.014", "5.2", "dynamic"] in lines
    done = cli("verify-scales", write_json(tmp_path / "g.json", gscale()), "--layers")
    assert "model.layers.77.self_attn.attn" in done.stdout
    assert "--layers" not in cli("verify-scales", good).stdout


def test_bar_plot(cli, good, tmp_path):
    """One column a layer, low layers lower; plain characters where the terminal has no others."""
    columns = [line for line in cli("verify-scales", good, env={"PYTHONIOENCODING": "utf-8", "COLUMNS": "100"}).lines if "│" in line]
    assert len(columns) == 8
    assert all(len(line.partition("│")[2]) <= 78 for line in columns)
    assert len(columns[-1].partition("│")[2]) == 78
    assert columns[0].partition("│")[2].startswith(" " * 60)
    plain = cli("verify-scales", good, env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert plain.stdout.isascii()
    assert any(line.endswith("#" * 20) for line in plain.lines)
    narrow = cli("verify-scales", good, env={"COLUMNS": "40"})
    assert all(len(line) <= 40 for line in narrow.lines if "│" in line)


def test_profile(cli, good, tmp_path):
    done = cli("verify-scales", good, "--profile", GLM)
    assert done.code == 0
    assert "draft layer 78" in done.stdout
    assert "needs latent_scale_identity=0 and 1" in done.stdout
    assert done.stderr == f"hint: mlactl warmup --profile {GLM} --scales {good} compiles the variants that this file needs\n"
    done = cli("verify-scales", write_json(tmp_path / "77.json", v1(77)), "--profile", GLM, "--json")
    assert done.code == 1
    assert [(row["check"], row["layer"]) for row in done.json["files"][0]["findings"] if row["severity"] == "error"] == [("layer-count", 77)]
    done = cli("verify-scales", write_json(tmp_path / "g.json", gscale()), "--profile", GLM)
    assert done.code == 1
    assert "no kernel reads this layout" in done.stdout
    done = cli("verify-scales", good, "--profile", "glm-5.2-tp8")
    assert done.code == 1
    assert "fp8_ds_mla" in done.stdout


def test_profile_that_names_its_file(cli, good):
    digest = cli("verify-scales", good, "--json").json["files"][0]["sha256"]
    profile = profile_with(cli, good, digest)
    done = cli("verify-scales", "--profile", profile)
    assert (done.code, done.lines[0]) == (0, f"{good}: valid")
    good.write_text(json.dumps(v1(), indent=1))
    done = cli("verify-scales", "--profile", profile)
    assert done.code == 1
    assert "sha256" not in done.lines[0]
    assert f"{digest} of profile mine" in done.stdout
    assert cli("verify-scales", "--profile", profile, "--sha256", cli("verify-scales", good, "--json").json["files"][0]["sha256"]).code == 0


def test_against_and_sha256(cli, good, bad, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(v1(), indent=3))
    done = cli.every_mode("verify-scales", good, "--against", other, rows="files")
    assert f"against {other}: 0 of 78 differ, though the digests do" in done["human"].stdout
    assert done["json"].json["files"][0]["against"] == {"path": str(other), "compared": 78, "differ": 0, "same_bytes": False}
    done = cli("verify-scales", good, "--against", bad)
    assert done.code == 1
    assert "78 of 78 differ" in done.stdout or "1 of 78 differ" in done.stdout
    digest = cli("verify-scales", good, "--json").json["files"][0]["sha256"]
    assert cli("verify-scales", good, "--sha256", digest).code == 0
    assert cli("verify-scales", good, "--sha256", "0" * 64).code == 1


def test_plot(cli, good, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "scales.png"
    done = cli("verify-scales", good, "--plot", target)
    assert (done.code, done.stderr) == (0, f"drew {target}\n")
    data = target.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (1200, 540)
    assert cli("verify-scales", good, "--plot", tmp_path / "absent" / "x.png").code == 2
    nothing = cli("verify-scales", write_json(tmp_path / "v2.json", {}), "--plot", tmp_path / "none.png")
    assert nothing.code == 1
    assert "was not drawn" in nothing.stderr
    assert not (tmp_path / "none.png").exists()


def test_plot_without_matplotlib(cli, good, tmp_path):
    code = "import sys; sys.modules['matplotlib'] = None; from mlactl.cli.app import main; sys.exit(main())"
    hidden = (
        "import importlib.util as u; find = u.find_spec; u.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest); "
        + code
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden, "verify-scales", str(good), "--plot", str(tmp_path / "x.png")], capture_output=True, text=True, env=cli.env
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: --plot needs matplotlib, which is not installed"
    assert "pip install 'mlactl[plot]'" in done.stderr


def checkpoint(tmp_path):
    shards = []
    for layer in range(3):
        tensors = module(f"model.layers.{layer}.self_attn.k_proj") | {f"model.layers.{layer}.self_attn.k_scale": scalar(0.5)}
        shards.append(tensors | module(f"model.layers.{layer}.mlp.down_proj", scale=2.0 ** -(8 + layer)))
    return write_sharded(tmp_path / "model", shards)


def test_a_checkpoint_in_every_mode(cli, tmp_path):
    folder = checkpoint(tmp_path)
    done = cli.every_mode("verify-scales", folder, rows="files")
    assert done["human"].lines[0] == f"{folder}: valid"
    assert "ModelOpt; 3 layers; 6 NVFP4 modules; 192 B of block scales scanned" in done["human"].stdout
    (row,) = done["json"].json["files"]
    assert (row["kind"], row["modules"], row["block_bytes"], row["sha256"], row["latent_scale_identity"]) == ("checkpoint", 6, 192, None, None)
    assert "layers" not in row
    (row,) = cli("verify-scales", folder, "--json", "--layers").json["files"]
    assert [(layer["layer"], layer["largest"], layer["k_scale"]) for layer in row["layers"]] == [
        (layer, 2.0 ** -(8 + layer), 0.5) for layer in range(3)
    ]
    blocks = bytearray(bytes([0x38]) * 32)
    blocks[5] = 0xFF
    name = "model.layers.1.mlp.down_proj"
    write_safetensors(
        folder / "model-00002-of-00003.safetensors",
        module(name, blocks=bytes(blocks), dtype="U8")
        | (module("model.layers.1.self_attn.k_proj") | {"model.layers.1.self_attn.k_scale": scalar(0.5)}),
    )
    done = cli.every_mode("verify-scales", folder, code=1, rows="files")
    (found,) = done["json"].json["files"][0]["findings"]
    assert (found["tensor"], found["index"], found["value"]) == (f"{name}.weight_scale", [1, 1], "0xFF, 1 such byte")


def test_json_verdict_imports_nothing_heavy(cli, good):
    code = (
        "import sys; from mlactl.cli.app import main; main(sys.argv[1:]);"
        "sys.stderr.write(repr([name for name in ('torch', 'numpy', 'cutlass', 'matplotlib', 'rich') if name in sys.modules]))"
    )
    for arguments in ((good,), (good, "--json"), (good, "--profile", GLM, "--json"), (good, "--against", good, "--json")):
        done = subprocess.run([sys.executable, "-c", code, "verify-scales", *map(str, arguments)], capture_output=True, text=True, env=cli.env)
        assert done.stderr.endswith("[]"), (arguments, done.stderr)


def test_names_with_escapes_do_not_reach_the_terminal(cli, tmp_path):
    document = gscale(layers=[])
    document["layers"] = {"model.layers.0.\x1b[31mred\ud800": {"latent_scale": -1}}
    path = write_json(tmp_path / "esc.json", document)
    done = cli.every_mode("verify-scales", path, code=1, rows="files")
    assert "\\x1b[31mred\\ud800" in done["human"].stdout
    odd = tmp_path / os.fsdecode(b"odd\xff\x1b.json")
    odd.write_text("{}")
    cli.every_mode("verify-scales", odd, code=1, rows="files")


def big_checkpoint(tmp_path, gib=8):
    """One shard of sparse block scales, long enough to be interrupted."""
    size = gib * 2**30
    header = {
        "model.layers.0.a.weight_scale": {"dtype": "F8_E4M3", "shape": [size // 2**13, 2**13], "data_offsets": [0, size]},
        "model.layers.0.a.weight_scale_2": {"dtype": "F32", "shape": [], "data_offsets": [size, size + 4]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "big.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + size + 4)
    return path


def bytes_read_by(process) -> int:
    lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def test_ctrl_c_stops_a_scan(cli, tmp_path):
    """The worker threads went on to the end of their shards before the program ended."""
    process = cli.start("verify-scales", big_checkpoint(tmp_path, gib=1024))
    while process.poll() is None and bytes_read_by(process) < 2**28:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in stderr


def test_progress_on_a_terminal_and_off_it(cli, tmp_path):
    path = big_checkpoint(tmp_path, gib=1)
    done = cli("verify-scales", path)
    assert "scanning block scales: 1024/1024 MiB" in done.stderr
    assert "MiB/s" in done.stderr
    assert cli("verify-scales", path, "-q").stderr == ""
    leader, follower = pty.openpty()
    process = cli.start("verify-scales", path, env={"TERM": "xterm", "COLUMNS": "120"}, stderr=follower)
    os.close(follower)
    drawn = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:
            break
        if not block:
            break
        drawn += block
    process.communicate(timeout=60)
    os.close(leader)
    assert b"scanning block scales" in drawn
    assert b"MiB/s" in drawn


# ---- scales fit


def test_fit_in_every_mode(cli, tmp_path):
    source = write_json(tmp_path / "amplitudes.json", amplitudes())
    target = tmp_path / "scales.json"
    done = cli.every_mode("scales", "fit", source, "-o", target, "--force")
    assert done["human"].lines[0].startswith(f"wrote {target}: 78 layers, sha256 ")
    assert done["human"].stderr == f"hint: mlactl verify-scales {target} --layers\n"
    assert done["quiet"].lines == [str(target)]
    assert (done["json"].json["num_layers"], done["json"].json["verdict"]) == (78, "valid")
    assert cli("verify-scales", target, "--profile", GLM, "--strict").code == 0
    assert cli("warmup", "--profile", GLM, "--scales", target, "--dry-run").code in (0, 1)


def test_fit_refuses(cli, tmp_path):
    source, target = write_json(tmp_path / "amplitudes.json", amplitudes()), tmp_path / "scales.json"
    assert cli("scales", "fit", source, "-o", target).code == 0
    before = target.read_bytes()
    done = cli("scales", "fit", source, "-o", target, "--headroom", "1.5")
    assert (done.code, done.stderr) == (2, f"error: {target}: is there already, nothing was written\nhint: --force replaces it\n")
    assert target.read_bytes() == before
    assert cli("scales", "fit", source, "-o", target, "--headroom", "1.5", "--force").code == 0
    assert json.loads(target.read_text())["headroom"] == 1.5
    bad = write_json(tmp_path / "bad.json", [1.0, -1.0, True, "x"])
    done = cli("scales", "fit", bad, "-o", tmp_path / "none.json")
    assert done.code == 1
    assert done.stderr.splitlines()[-2] == f"error: {bad}: layer 1 max_abs[1]: -1.0, expected a finite max_abs above 0 (and 2 more)"
    assert 'layer 3 max_abs[3]: "x"' in done.stderr
    assert not (tmp_path / "none.json").exists()
    assert cli("scales", "fit", tmp_path / "absent.json", "-o", tmp_path / "none.json").code == 2
    done = cli("scales", "fit", write_json(tmp_path / "77.json", amplitudes(77)), "-o", tmp_path / "none.json", "--profile", GLM)
    assert done.code == 1
    assert "none for layer 77" in done.stderr


def test_fit_into_a_folder_that_is_not_there(cli, tmp_path):
    """The hint was to list the file that could not be written."""
    source = write_json(tmp_path / "amplitudes.json", [3.5])
    done = cli("scales", "fit", source, "-o", tmp_path / "nodir" / "f.json")
    folder = tmp_path / "nodir"
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == f"error: {folder / 'f.json'}: there is no folder {folder}\nhint: mkdir -p {folder}\n"
    assert cli("scales", "fit", source, "-o", tmp_path / "one.json").stdout.startswith(f"wrote {tmp_path / 'one.json'}: 1 layer, sha256 ")


def test_the_headline_says_that_no_latents_were_measured(cli, good, tmp_path):
    other = write_safetensors(tmp_path / "latents.safetensors", {"layers.90.kv_c": ("F32", [1, 16], struct.pack("<16f", *[1.0] * 16))})
    done = cli("verify-scales", good, "--latents", other)
    assert (done.code, done.lines[0]) == (0, f"{good}: valid with 1 warning; nothing was measured against the latents")
    strict = cli("verify-scales", good, "--latents", other, "--strict")
    assert strict.lines[0] == f"{good}: 1 warning, which --strict does not allow; nothing was measured against the latents"
    assert strict.code == 1


def test_fit_and_plot_leave_alone_what_is_no_regular_file_or_is_read(cli, good, tmp_path):
    """`scales fit -o` replaced a device node, even with --force it must not; `--plot` drew over the very file it judged."""
    source = write_json(tmp_path / "amplitudes.json", amplitudes())
    before = source.read_bytes()
    os.mkfifo(tmp_path / "pipe.png")
    for name, said in (("pipe.png", "is a pipe, expected a file to write"), ("amplitudes.json", "is the same file as")):
        done = cli("scales", "fit", source, "-o", tmp_path / name, "--force")
        assert (done.code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {tmp_path / name}: {said}")
    assert source.read_bytes() == before
    picture = tmp_path / "picture.png"
    picture.symlink_to(good)
    scales = good.read_bytes()
    for name, said in (("pipe.png", "is a pipe, expected a file to write"), ("picture.png", "is the same file as")):
        done = cli("verify-scales", good, "--plot", tmp_path / name)
        assert (done.code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {tmp_path / name}: {said}")
    assert good.read_bytes() == scales
    assert stat.S_ISFIFO((tmp_path / "pipe.png").lstat().st_mode)


def test_warmup_compiles_what_the_file_and_the_draft_layers_need(cli, good, tmp_path):
    """A profile's scale file narrows the plan to its variants; an invalid one stops warmup."""

    def planned(*arguments):
        done = cli("warmup", "--profile", GLM, "--arch", "sm_120a", "--dry-run", "--json", *arguments)
        assert done.code in (0, 1), done.stderr
        return set(findall_identity(done.stdout))

    assert planned("--scales", good) == {0, 1}
    broken = write_json(tmp_path / "broken.json", v1(77))
    done = cli("warmup", "--profile", GLM, "--scales", broken, "--dry-run")
    assert done.code == 1
    assert "layer 77" in done.stderr


def findall_identity(text):
    return [int(value) for value in re.findall(r'"latent_scale_identity":\s*([01])', text)]
