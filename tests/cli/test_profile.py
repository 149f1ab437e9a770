"""`mlactl profile ls, show, check`: every output mode and exit code."""

import os
import sys

import pytest

GOOD = """
name = "mine"
[model]
heads = 64
latent_dim = 512
rope_dim = 64
[parallel]
tp = 4
[kv]
record = "bf16"
page_size = 64
kv_dtype = "bf16"
q_dtype = "bf16"
[serving]
modes = ["decode"]
"""


@pytest.fixture
def own(cli):
    """A writer of profiles into the user's folder."""
    folder = cli.home / ".config" / "mlactl" / "profiles"
    folder.mkdir(parents=True)

    def write(name, text):
        (folder / f"{name}.toml").write_text(text)
        return folder / f"{name}.toml"

    return write


def test_ls_in_every_mode(cli):
    done = cli.every_mode("profile", "ls", rows="profiles")
    names = [row["name"] for row in done["json"].json["profiles"]]
    assert names == ["ci-small", "glm-5.2-tp4-dcp4", "glm-5.2-tp8", "kimi-k3-tp16-dcp16", "kimi-k3-tp8-dcp8", "kimi-k3-tp8-dcp8-bf16"]
    assert done["quiet"].lines == names
    assert [line.split()[0] for line in done["human"].lines] == ["name", *names]
    assert done["human"].stderr.startswith("6 profiles\n")
    row = next(row for row in done["json"].json["profiles"] if row["name"] == "kimi-k3-tp8-dcp8")
    assert (row["tp"], row["dcp"], row["kernel_heads"], row["record"], row["origin"], row["error"]) == (8, 8, 96, "fp8", "shipped", None)


def test_ls_tells_complete_profiles_from_those_with_kernels_to_come(cli):
    from mlactl.profiles import load

    done = cli("profile", "ls", "--json")
    for row in done.json["profiles"]:
        missing = load(row["name"]).unbuilt()
        assert row["complete"] is (not missing)
        assert [item["reason"] for item in row["not_built"]] == [reason for _, reason in missing]
    assert next(row for row in done.json["profiles"] if row["name"] == "kimi-k3-tp8-dcp8-bf16")["complete"] is True
    line = next(line for line in cli("profile", "ls").lines if line.startswith("kimi-k3-tp8-dcp8-bf16 "))
    assert "complete" in line


def test_ls_says_what_a_users_profile_hides(cli, own):
    path = own("ci-small", GOOD.replace('"mine"', '"ci-small"'))
    done = cli("profile", "ls")
    assert f"ci-small: the user file {path} hides the shipped one" in done.stderr.splitlines()
    row = next(row for row in cli("profile", "ls", "--json").json["profiles"] if row["name"] == "ci-small")
    assert (row["origin"], row["shadows"], row["path"]) == ("user", ["shipped"], str(path))


def test_ls_lists_a_profile_that_cannot_be_used_and_exits_0(cli, own):
    own("broken", GOOD.replace("tp = 4", "tp = 3").replace('"mine"', '"broken"'))
    done = cli.every_mode("profile", "ls", rows="profiles")
    row = next(row for row in done["json"].json["profiles"] if row["name"] == "broken")
    assert row["error"] == "model.heads: 64 heads do not divide over parallel.tp = 3 ranks"
    assert "broken: model.heads: 64 heads do not divide over parallel.tp = 3 ranks" in done["human"].stderr.splitlines()
    assert next(line for line in done["human"].lines if line.startswith("broken ")).split()[-4:] == ["cannot", "be", "used", "user"]


def test_show_in_every_mode(cli):
    done = cli.every_mode("profile", "show", "kimi-k3-tp8-dcp8")
    document = done["json"].json
    assert document["profile"]["computed"] == {"local_heads": 12, "kernel_heads": 96, "local_shard_tokens": 131072}
    assert document["arches"] == ["sm_120a", "sm_121a", "sm_90a"]
    assert document["profile"]["model"] == {"heads": 96, "latent_dim": 512, "rope_dim": 64, "layers": None, "draft_layers": 0}
    assert done["quiet"].lines == [spec["label"] for spec in document["specs"]]
    text = done["human"].stdout
    assert "heads a kernel sees   96 (12 x 8 after the DCP gather)\n" in text
    assert "tokens a shard holds  131072 of 1048576\n" in text
    for spec in document["specs"]:
        assert spec["label"] in text
    assert done["human"].stderr == "hint: mlactl warmup --profile kimi-k3-tp8-dcp8 --dry-run\n"


def test_show_names_what_is_not_built(cli):
    from mlactl.profiles import load

    document = cli("profile", "show", "glm-5.2-tp4-dcp4", "--json").json
    expected = {spec.label(): reason for spec, reason in load("glm-5.2-tp4-dcp4").unbuilt()}
    assert {spec["label"]: spec["not_built"] for spec in document["specs"] if spec["not_built"]} == expected
    assert document["complete"] is (not expected)


def test_show_without_a_longest_context_says_what_is_not_known(cli):
    done = cli("profile", "show", "kimi-k3-tp16-dcp16")
    assert "tokens a shard holds  not known without serving.max_context\n" in done.stdout


@pytest.mark.parametrize("command", [("profile", "show"), ("profile", "check"), ("warmup", "--check", "--profile"), ("cache", "why", "--profile")])
def test_an_unknown_name_is_a_usage_error_in_every_command(cli, command):
    """`show` exited 1 and `warmup` 2; 1 is what `check` finds and `warmup --check` misses, so a script read a typing error as that."""
    done = cli(*command, "kimi")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no profile named 'kimi', ")
    assert done.stderr.endswith("\nhint: mlactl profile ls; a path needs a '/' or ends in .toml\n")


def test_show_of_a_bad_file_exits_2_and_says_how_to_see_everything(cli, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(GOOD.replace("tp = 4", "tp = 3"))
    done = cli("profile", "show", path)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == f"error: {path}: model.heads: 64 heads do not divide over parallel.tp = 3 ranks\nhint: mlactl profile check {path}\n"


def test_check_of_good_files_exits_0_in_every_mode(cli, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    done = cli.every_mode("profile", "check", path, "ci-small")
    assert done["quiet"].stdout == ""
    from mlactl.profiles import load

    assert done["human"].lines[0] == f"{path}: ok, {len(load(str(path)).specs())} objects an arch"
    assert [(row["name"], row["ok"], row["findings"]) for row in done["json"].json["profiles"]] == [("mine", True, []), ("ci-small", True, [])]


def test_check_names_every_finding_and_exits_1_in_every_mode(cli, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace("tp = 4", "tp = 3").replace("page_size = 64", "page_size = 17"))
    done = cli.every_mode("profile", "check", path, code=1)
    assert done["human"].lines == [
        f"{path}: model.heads: 64 heads do not divide over parallel.tp = 3 ranks",
        f"{path}: kv.page_size: 17 is neither 1 nor a multiple of 16",
    ]
    assert done["quiet"].lines == [str(path)]
    assert done["json"].json["profiles"][0]["findings"] == [
        {"key": "model.heads", "message": "64 heads do not divide over parallel.tp = 3 ranks"},
        {"key": "kv.page_size", "message": "17 is neither 1 nor a multiple of 16"},
    ]


def test_check_of_an_absent_file_exits_2(cli, tmp_path):
    done = cli("profile", "check", tmp_path / "absent.toml")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path}/absent.toml: no such file or directory\nhint: ls -ld {tmp_path}/absent.toml\n"


def test_check_judges_each_and_the_worst_code_counts(cli, tmp_path):
    """The first unknown name ended the command, and what was wrong with the files before it was never said."""
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(GOOD)
    bad.write_text(GOOD.replace("tp = 4", "tp = 3"))
    done = cli.every_mode("profile", "check", bad, "nosuch", good, tmp_path / "absent.toml", code=2)
    finding = {"key": "model.heads", "message": "64 heads do not divide over parallel.tp = 3 ranks"}
    rows = done["json"].json["profiles"]
    assert [(row["path"], row["name"], row["ok"], row["findings"]) for row in rows] == [
        (str(bad), "mine", False, [finding]),
        (None, "nosuch", False, []),
        (str(good), "mine", True, []),
        (f"{tmp_path}/absent.toml", None, False, []),
    ]
    assert [row["error"] is None for row in rows] == [True, False, True, False]
    assert rows[1]["error"].startswith("no profile named 'nosuch', ")
    assert [line.split(": ")[0] for line in done["human"].lines] == [str(bad), str(good)]
    assert done["quiet"].lines == [str(bad), "nosuch", f"{tmp_path}/absent.toml"]
    for result in done.values():
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert [line.split()[1] for line in errors] == ["no", f"{tmp_path}/absent.toml:"]
    assert cli("profile", "check", good, bad).code == 1


def test_a_byte_order_mark_is_called_one(cli, tmp_path):
    """The parser says "Invalid statement (at line 1, column 1)" of a character that no editor shows."""
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    done = cli("profile", "check", path)
    assert done.code == 1
    assert done.stdout == f"{path}: begins with a byte order mark (EF BB BF), expected plain UTF-8: save it without one\n"


def test_a_pipe_among_the_profiles_is_listed_as_bad(cli, own):
    """`profile ls`, and completion with it, waited for ever for somebody to write to a pipe in the user's folder."""
    pipe = own("mine", GOOD).with_name("pipe.toml")
    os.mkfifo(pipe)
    huge = own("huge", "")
    os.truncate(huge, 1 << 40)
    done = cli("profile", "ls", "--json", timeout=120)
    errors = {row["name"]: row["error"] for row in done.json["profiles"]}
    assert done.code == 0
    assert errors["pipe"] == f"{pipe}: is a pipe, expected a file"
    assert errors["huge"] == f"{huge}: 1099511627776 bytes, expected at most 1048576 of TOML"
    assert errors["mine"] is None
    for command in (("profile", "show"), ("profile", "check"), ("warmup", "--check", "--profile")):
        done = cli(*command, "pipe", timeout=120)
        assert done.code == 2
        assert done.stderr.startswith(f"error: {pipe}: is a pipe, expected a file\n")


def test_a_pipe_as_scale_file_is_a_finding(cli, tmp_path):
    """Hashing the scale file that a profile names waited for ever as well."""
    os.mkfifo(tmp_path / "scales.json")
    path = tmp_path / "mine.toml"
    path.write_text(GOOD + '[scales]\nfile = "scales.json"\n')
    done = cli("profile", "check", path, timeout=120)
    assert done.code == 1
    assert f"{path}: scales.file: {tmp_path}/scales.json: is a pipe, expected a file" in done.lines


def test_without_a_home_directory_the_users_folder_is_skipped(cli, tmp_path):
    """In a container whose uid has no passwd entry and no HOME, every lookup of a profile was an internal error."""
    code = (
        "import os.path, sys; os.path.expanduser = lambda path: path; "  # what it does there
        "from mlactl.cli.app import main; sys.exit(main())"
    )
    cli.launch = (sys.executable, "-c", code)
    (tmp_path / "~" / ".config" / "mlactl" / "profiles").mkdir(parents=True)
    (tmp_path / "~" / ".config" / "mlactl" / "profiles" / "stray.toml").write_text(GOOD)
    done = cli("profile", "ls", "-q", cwd=tmp_path, env={"HOME": None})
    assert (done.code, done.lines[0]) == (0, "ci-small")
    assert "stray" not in done.lines
    done = cli("profile", "check", "~/mine.toml", "ci-small", cwd=tmp_path, env={"HOME": None})
    assert done.code == 2
    assert done.stderr.startswith(f"error: {tmp_path}/~/mine.toml: no such file or directory\n")
