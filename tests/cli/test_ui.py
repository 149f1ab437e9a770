"""Output modes and progress: what each puts on stdout and stderr, and when it asks."""

import io
import json
import threading
from dataclasses import dataclass

import pytest

from mlactl.errors import NotFound, UsageError
from mlactl.ui import progress
from mlactl.ui.output import ROW_LIMIT, Column, Mode, Output, age_text, bytes_text

COLUMNS = (Column("key", lambda row: row["key"]), Column("size", lambda row: str(row["size"]), right=True))


@dataclass
class Streams:
    """An Output and what it wrote."""

    out: Output

    @property
    def stdout(self):
        return self.out.stdout.getvalue()

    @property
    def stderr(self):
        return self.out.stderr.getvalue()


def streams(mode=Mode.HUMAN):
    return Streams(Output(mode, stdout=io.StringIO(), stderr=io.StringIO()))


def rows(count):
    return [{"key": f"k{number}", "size": number} for number in range(count)]


def test_listing_for_people_is_aligned_without_trailing_spaces_and_counted_on_stderr():
    it = streams()
    it.out.listing("entries", rows(2), COLUMNS, key=lambda row: row["key"])
    assert it.stdout == "key  size\nk0      0\nk1      1\n"
    assert it.stderr == "2 entries\n"


def test_listing_of_one_row_is_counted_in_the_singular():
    it = streams()
    it.out.listing("entries", rows(1), COLUMNS, key=lambda row: row["key"])
    assert it.stderr == "1 entry\n"


def test_listing_for_people_stops_at_the_limit_and_says_so():
    it = streams()
    it.out.listing("entries", rows(ROW_LIMIT + 5), COLUMNS, key=lambda row: row["key"])
    assert len(it.stdout.splitlines()) == ROW_LIMIT + 1
    assert it.stderr == f"{ROW_LIMIT + 5} entries, {ROW_LIMIT} shown; --all prints every one\n"


def test_listing_with_all_is_plain_lines():
    it = streams()
    it.out.listing("entries", rows(ROW_LIMIT + 5), COLUMNS, key=lambda row: row["key"], show_all=True)
    assert it.stdout.splitlines()[0] == "k0  0"
    assert len(it.stdout.splitlines()) == ROW_LIMIT + 5


@pytest.mark.parametrize(
    ("mode", "expected"), [(Mode.HUMAN, ""), (Mode.QUIET, ""), (Mode.JSONL, ""), (Mode.JSON, '{"schema_version":1,"entries":[]}\n')]
)
def test_an_empty_listing_puts_only_json_on_stdout(mode, expected):
    it = streams(mode)
    it.out.listing("entries", [], COLUMNS, key=lambda row: row["key"], empty="the cache is empty")
    assert it.stdout == expected
    assert it.stderr == ("the cache is empty\n" if mode is Mode.HUMAN else "")


def test_a_cell_is_never_read_as_markup():
    """A path with brackets in it vanished from a table, and one with [/] raised."""
    it = streams()
    it.out.listing("entries", [{"key": "[red]x[/]", "size": 1}], COLUMNS, key=lambda row: row["key"])
    assert it.stdout.splitlines()[1] == "[red]x[/]     1"


def test_a_wide_table_in_a_pipe_is_not_cut():
    it = streams()
    wide = "x" * 500
    it.out.listing("entries", [{"key": wide, "size": 1}], COLUMNS, key=lambda row: row["key"])
    assert it.stdout.splitlines()[1] == f"{wide}     1"


def test_json_keeps_integers_and_unicode():
    it = streams(Mode.JSON)
    it.out.document({"bytes": 2**53, "name": "é"}, human=lambda: pytest.fail("not for people"))
    assert json.loads(it.stdout) == {"schema_version": 1, "bytes": 2**53, "name": "é"}


@pytest.mark.parametrize("mode", list(Mode))
def test_errors_and_warnings_go_to_stderr_in_every_mode(mode):
    it = streams(mode)
    it.out.error(NotFound("no entry abc", hint="mlactl cache ls"))
    it.out.warn("slow disk")
    assert it.stdout == ""
    assert it.stderr == "error: no entry abc\nhint: mlactl cache ls\nwarning: slow disk\n"


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.JSONL, Mode.QUIET])
def test_remarks_are_for_people_only(mode):
    it = streams(mode)
    it.out.note("12 entries")
    it.out.hint("mlactl cache verify")
    assert (it.stdout, it.stderr) == ("", "")


EVIL = "a\x1b[31m\x07\x9b2J\u202eb\udcff"
SAFE = "a\\x1b[31m\\x07\\x9b2J\\u202eb\\udcff"


def test_control_characters_do_not_reach_people():
    """A file whose name held an escape sequence recoloured the terminal, moved its cursor or set its title."""
    made = streams()
    made.out.line(EVIL)
    made.out.listing("rows", [{"key": EVIL, "size": 1}], COLUMNS, key=lambda row: row["key"])
    made.out.listing("rows", [{"key": EVIL, "size": 1}], COLUMNS, key=lambda row: row["key"], show_all=True)
    assert [line.split()[0] for line in made.stdout.splitlines()] == [SAFE, "key", SAFE, SAFE]
    for say in (made.out.note, made.out.hint, made.out.warn):
        say(EVIL)
    made.out.error(NotFound(EVIL, hint=EVIL))
    with made.out.progress(EVIL, 1, "files"):
        pass
    expected = ["1 row", SAFE, f"hint: {SAFE}", f"warning: {SAFE}", f"error: {SAFE}", f"hint: {SAFE}", f"{SAFE}: 0/1 files"]
    assert made.stderr.splitlines() == expected


def test_quiet_output_is_one_safe_line_a_row():
    """A file name with a line break in it was two rows to the next program of a pipe."""
    made = streams(Mode.QUIET)
    made.out.listing("rows", [{"key": f"{EVIL}\nc", "size": 1}], COLUMNS, key=lambda row: row["key"])
    assert made.stdout == f"{SAFE}\\nc\n"


def test_lines_and_tabs_of_longer_text_stay():
    made = streams()
    made.out.line("# HELP\ta\nb")
    assert made.stdout == "# HELP\ta\nb\n"


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.JSONL])
def test_names_that_are_not_utf_8_are_spelled_out_in_json(mode):
    """A path of other bytes than UTF-8 ended every JSON command with an internal UnicodeEncodeError."""
    made = streams(mode)
    made.out.document({"path": "/a\udcff", "\udc80": [("x", "\udc81"), {"n": 1}], "text": "ä\x1b"}, lambda: None)
    made.out.stdout.getvalue().encode()
    assert json.loads(made.stdout) == {"schema_version": 1, "path": "/a\\udcff", "\\udc80": [["x", "\\udc81"], {"n": 1}], "text": "ä\x1b"}


def test_no_color_wins_over_force_color_in_a_pipe(monkeypatch):
    """FORCE_COLOR made rich take a pipe for a terminal, so NO_COLOR took the colours and left rules and a fixed width."""
    plain = streams()
    plain.out.table(COLUMNS, rows(2))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    forced = streams()
    forced.out.table(COLUMNS, rows(2))
    assert forced.stdout == plain.stdout


def test_confirm_off_a_terminal_refuses_instead_of_asking():
    with pytest.raises(UsageError, match="remove 3 entries\\? cannot be asked without a terminal") as caught:
        streams().out.confirm("remove 3 entries?", yes=False)
    assert caught.value.hint == "add --yes to go ahead or --dry-run to only look"


def test_confirm_with_yes_asks_nothing():
    it = streams()
    assert it.out.confirm("remove 3 entries?", yes=True) is True
    assert it.stderr == ""


def test_progress_in_a_log_is_a_first_line_one_now_and_then_and_a_last(monkeypatch):
    clock = iter([0.0, 1.0, 7.0, 7.0, 8.0, 8.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    it = streams()
    with it.out.progress("compiling", 3, "kernels") as task:
        for _ in range(3):
            task.describe("some kernel")
            task.advance()
    assert it.stderr.splitlines() == ["compiling: 0/3 kernels", "compiling: 2/3 kernels, 0.3 kernels/s", "compiling: 3/3 kernels, 0.4 kernels/s"]
    assert it.stdout == ""


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.JSONL, Mode.QUIET])
def test_progress_is_silent_in_a_log_unless_for_people(mode):
    it = streams(mode)
    with it.out.progress("compiling", 3, "kernels") as task:
        task.advance()
        task.describe("x")
    assert (it.stdout, it.stderr) == ("", "")


class Heard(io.StringIO):
    """A stream that says when it was written to."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def write(self, text):
        done = super().write(text)
        if text.endswith("\n"):
            self.written.set()
        return done


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.JSONL, Mode.QUIET, Mode.HUMAN])
def test_steady_progress_speaks_during_a_single_step_in_every_mode(mode, monkeypatch):
    """Work of one long step said nothing between 0/1 and 1/1, and nothing at all beside JSON."""
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.01)
    stream = Heard()
    with Output(mode, stdout=io.StringIO(), stderr=stream).progress("replaying", 1, "captures", steady=True) as task:
        for text in ("reference", EVIL):
            task.describe(text)
            for _ in range(2):  # the line that may have been under way when the text changed, and the next one
                stream.written.clear()
                assert stream.written.wait(60)
        task.advance()
    lines = stream.getvalue().splitlines()
    assert "replaying: 0/1 captures, reference" in lines
    assert f"replaying: 0/1 captures, {SAFE}" in lines
    assert lines[-1] == "replaying: 1/1 captures"
    assert (lines[0] == "replaying: 0/1 captures") == (mode is Mode.HUMAN)


def test_steady_progress_of_short_work_is_silent_beside_data(monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 3600)
    it = streams(Mode.JSON)
    with it.out.progress("replaying", 1, "captures", steady=True) as task:
        task.describe("x")
        task.advance()
    assert it.stderr == ""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("mode", [Mode.HUMAN, Mode.JSON])
def test_progress_on_a_terminal_is_a_bar_with_count_and_rate_that_goes_away(mode, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Output(mode, stdout=io.StringIO(), stderr=Terminal())
    with out.progress("compiling", 3, "kernels") as task:
        task.describe("merge")
        task.advance(2)
    drawn = out.stderr.getvalue()
    assert "compiling" in drawn
    assert "2/3" in drawn
    assert "kernels/s" in drawn
    assert out.stdout.getvalue() == ""


@pytest.mark.parametrize(
    ("size", "text"), [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (87_142, "85.1 KiB"), (5 * 2**40, "5120.0 GiB")]
)
def test_sizes(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0, "0s"), (119.9, "119s"), (120, "2m"), (7200, "2h"), (172_800, "2d"), (86_400 * 41, "41d")]
)
def test_ages(seconds, text):
    assert age_text(seconds) == text
