"""The advisories file: this release's own, and what each mistake in one is told."""

from pathlib import Path

import pytest

from mlactl.cache.advisories import BUNDLED, bundled, in_range, load
from mlactl.errors import CannotRun
from mlactl.kernels import registry
from mlactl.kernels.mla.sparse_records import SPARSE_RECORDS

GOOD = """
schema_version = 1

[[advisory]]
id = "local-1"
title = "A fault of this site"
severity = "conviction"
consequence = "outputs are wrong"
remedy = "remove it"

[[advisory.case]]
format = "mlactl"
kernels = ["attention.dense_mla"]
versions = "<=4"
where = { window = [true], width = [576, 1088] }
absent = ["lengths"]
"""


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "local.toml"
        path.write_text(text)
        return path

    return write


def test_this_release():
    known = bundled()
    assert [advisory.id for advisory in known.advisories] == ["identity-replay", "b12x-planned-path-without-scale"]
    for advisory in known.advisories:
        for case in advisory.case:
            if case.format == "mlactl":
                assert set(case.kernels) <= set(registry.KERNELS)
    replay = known.advisories[0]
    (own,) = [case for case in replay.case if case.format == "mlactl"]
    assert set(own.where["record"]) == {name for name, record in SPARSE_RECORDS.items() if record.static}
    assert replay.acquitted_by in {place.name for place in known.parameters}
    assert BUNDLED.name == "advisories.toml"


def test_every_identity_split_scalar_has_an_advisory_for_keys_without_it():
    """A new one without an advisory would repeat the incident for caches of before."""
    covered = {(kernel, fact) for advisory in bundled().advisories for case in advisory.case for kernel in case.kernels for fact in case.absent}
    for kernel in registry.KERNELS.values():
        for scalar in kernel.scalars:
            if scalar.treatment == "identity-split":
                assert (kernel.kernel_id, f"{scalar.name}_identity") in covered
                assert scalar.ordinal is not None


def test_a_file_of_ones_own_is_added(file):
    known = load(file(GOOD))
    assert [advisory.id for advisory in known.advisories] == ["identity-replay", "b12x-planned-path-without-scale", "local-1"]
    assert known.advisories[-1].case[0].where == {"window": (True,), "width": (576, 1088)}
    assert known.parameters == bundled().parameters
    assert load() == bundled()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema_version = 1", "schema_version = 2", "schema_version: 2, this release reads 1"),
        ("schema_version = 1", "", "missing required field `schema_version`"),
        ("schema_version = 1", "schema_version = 1\nnote = 'x'", "unknown field `note`"),
        ('remedy = "remove it"', "", "advisory[0]: Object missing required field `remedy`"),
        ('remedy = "remove it"', 'remedy = "remove it"\nauthor = "me"', "advisory[0]: Object contains unknown field `author`"),
        ('remedy = "remove it"', "remedy = 3", "advisory[0].remedy: Expected `str`, got `int`"),
        ('remedy = "remove it"', 'remedy = " "', "advisory[0].remedy: an empty text"),
        ('"conviction"', '"fatal"', "advisory[0].severity: Invalid enum value 'fatal'"),
        ('id = "local-1"', 'id = "Local 1"', "advisory[0].id: 'Local 1', expected lower-case letters"),
        ('id = "local-1"', 'id = "identity-replay"', "advisory[0].id: 'identity-replay' is one of this release's advisories"),
        ('format = "mlactl"', 'format = "other"', "advisory[0].case[0].format: Invalid enum value 'other'"),
        ('kernels = ["attention.dense_mla"]', "kernels = []", "advisory[0].case[0].kernels: no kernel"),
        ('"<=4"', '"4 or less"', "advisory[0].case[0].versions: '4 or less', expected comparisons such as '>=15,<18'"),
        ("window = [true]", "window = []", "advisory[0].case[0].where.window: an empty list of values"),
        ("window = [true]", "window = [1.5]", "advisory[0].case[0].where[...][0]: Expected `bool | int | str`, got `float`"),
        ("window = [true]", "window = true", "advisory[0].case[0].where[...]: Expected `array`, got `bool`"),
        ("[[advisory.case]]", "[advisory.case]", "advisory[0].case: Expected `array`, got `object`"),
        ("where = { window = [true], width = [576, 1088] }\nabsent = ", "unless = { x = [1] }\n#", "neither where nor absent"),
        ("title =", "title", "not TOML: "),
    ],
)
def test_mistakes_are_named_with_their_place(file, old, new, said):
    assert old in GOOD
    path = file(GOOD.replace(old, new))
    with pytest.raises(CannotRun) as refused:
        load(path)
    assert refused.value.message.startswith(f"{path}: ")
    assert said in refused.value.message
    assert refused.value.hint == "docs/audit.md describes the format"


def test_a_repeated_id_and_an_advisory_without_cases(file):
    with pytest.raises(CannotRun, match=r"advisory\[1\].id: 'local-1' is the id of advisory\[0\] too"):
        load(file(GOOD + GOOD.replace("schema_version = 1", "")))
    with pytest.raises(CannotRun, match=r"advisory\[0\].case: an advisory without a case hits nothing"):
        load(file(GOOD.partition("[[advisory.case]]")[0] + "case = []\n"))


PLACE = """
schema_version = 1
[[parameter]]
format = "b12x"
kernel = "k"
versions = "==53"
name = "s"
fact = "s_identity"
ordinal = 6
size_bytes = 4
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ordinal = 6", "ordinal = -1", "parameter[0]: ordinal -1 and size_bytes 4"),
        ('"b12x"', '"mlactl"', "parameter[0].format: the ordinals of this tool's own kernels come from its registry"),
        ('"==53"', '""', "parameter[0].versions: ''"),
        ('fact = "s_identity"', 'fact = ""', "parameter[0].fact: an empty text"),
    ],
)
def test_mistakes_in_places_of_parameters(file, old, new, said):
    assert load(file(PLACE)).parameters[-1].ordinal == 6
    with pytest.raises(CannotRun) as refused:
        load(file(PLACE.replace(old, new)))
    assert said in refused.value.message


def test_what_is_no_file_of_text(tmp_path):
    with pytest.raises(CannotRun, match="no such file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(CannotRun, match="is a folder, expected a file"):
        load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(CannotRun, match="not TOML"):
        load(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("version", "text", "inside"), [(17, ">=15,<18", True), (18, ">=15,<18", False), (14, ">= 15, < 18", False), (53, "==53", True), (1, "", True)]
)
def test_version_ranges(version, text, inside):
    assert in_range(version, text) is inside


def test_the_file_on_the_page_loads_as_it_stands(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "audit.md").read_text()
    text = page.partition("```toml\n")[2].partition("```")[0]
    path = tmp_path / "local.toml"
    path.write_text(text)
    (added,) = load(path).advisories[len(bundled().advisories) :]
    assert (added.id, added.case[0].kernels) == ("local-merge-nan", ("attention.dense_mla.merge",))
    for needed in ("schema_version = 1", "where = { groups = [8] }"):
        path.write_text(text.replace(needed, ""))
        with pytest.raises(CannotRun):
            load(path)
