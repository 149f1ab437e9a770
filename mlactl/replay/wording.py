"""What a comparison found, in lines that the terminal and JUnit share."""

from __future__ import annotations

import math

from mlactl.printable import counted
from mlactl.replay.compare import Cluster, Comparison, Element, WorstRow
from mlactl.replay.report import Bisection, Hypothesis


def summary(item: Comparison) -> str:
    """One line about a comparison that fails: how much, by which rules, and the worst element."""
    worst = f"; worst at {element_text(item.worst)}" if item.worst is not None else ""
    return f"{item.name}: {why(item)}{worst}"


def why(item: Comparison) -> str:
    """How much is wrong: `3 of 8,192 elements`, `16 of 16 rows by norm`."""
    rows = f"{item.bad_rows:,} of {item.rows:,} rows"
    if item.mismatches:
        return f"{item.mismatches:,} of {item.elements:,} elements and {rows} are wrong"
    rules = [name for name, count in (("norm", item.failing.norm), ("cosine", item.failing.cosine)) if count]
    return f"{rows} are wrong by {' and '.join(rules)}" if rules else "; ".join(item.notes)


def rule_lines(item: Comparison) -> list[str]:
    """A line for every rule that rows fail by: how far off the furthest is, and the limit."""
    found, used, lines = item.failing, item.tolerance, []
    if item.mismatches:
        limit = "differ" if used.elements_exact() else f"off by more than {used.text()}"
        lost = f", {item.not_finite:,} of them not finite" if item.not_finite else ""
        lines.append(f"element: {item.mismatches:,} in {_rows(found.element)} {limit}{lost}")
    if found.cosine and used.cosine is not None:
        lines.append(f"cosine: {_rows(found.cosine)} under {used.cosine:g}{_furthest('lowest', item.cosine)}")
    if found.norm and used.norm is not None:
        lines.append(f"norm: {_rows(found.norm)} off by more than {used.norm:g}{_furthest('largest', item.norm_deviation)}")
    return lines


def _rows(count: int) -> str:
    return counted(count, "row")


def _furthest(word: str, value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return f", the {word} is {value:.7f}" if word == "lowest" else f", the {word} is {value:.4g}"


def detail_lines(item: Comparison) -> list[tuple[str, str]]:
    """(label, text) lines of a comparison: notes, and where it fails, the rules, first and worst element, worst row, and clusters."""
    lines = [("", note) for note in item.notes]
    if item.matches:
        return lines
    lines += [("fails by", text) for text in rule_lines(item)]
    if item.mismatches and item.first is not None:
        lines.append(("first", element_text(item.first)))
    if item.worst is not None:
        # Where only whole rows are wrong no element is: the one that is furthest off is still where to look.
        lines.append(("worst", element_text(item.worst) + ("" if item.mismatches else ", within the element's tolerance")))
    if item.worst_row is not None and item.name != "lse":
        lines.append(("worst row", row_text(item.worst_row)))
    return lines + [(cluster.axis, cluster_text(cluster)) for cluster in item.clusters]


def element_text(item: Element) -> str:
    """`request 1, row 5, head 3, dim 12: 0.5, expected 0.25, 2 ulp apart`; with as many digits as tell the two apart."""
    ulp = f", {item.ulp:,} ulp apart" if item.ulp is not None else ""
    left, right = _apart(item.actual, item.expected)
    return f"{item.where()}: {left}, expected {right}{ulp}"


def _apart(left: float, right: float) -> tuple[str, str]:
    if isinstance(left, int) and isinstance(right, int):
        return str(left), str(right)
    for digits in (6, 9, 17):
        texts = f"{left:.{digits}g}", f"{right:.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    # Equal as floats, or one is an integer that fp64 cannot hold.
    return (f"{left:.6g}", f"{right:.6g}") if left == right else (str(left), str(right))


def row_text(row: WorstRow) -> str:
    """Where a row is and how far off: by cosine, norm and its largest error."""
    place = ", ".join(f"{name} {position}" for name, position in row.coordinates)
    if row.not_finite:
        return f"{place}: not finite in {row.not_finite:,} element{'s' if row.not_finite != 1 else ''}, so it has no cosine and no norm"
    if math.isinf(row.norm_ratio):
        return f"{place}: all zero is expected, the largest value is {row.largest_error:.3g}"
    share = f"{row.largest_error_share:.2%}" if row.largest_error_share < 1e4 else f"{row.largest_error_share:.3g} times"
    norm = f"{row.norm_ratio:.5f}" if row.norm_ratio < 1e4 else f"{row.norm_ratio:.3g} times"
    return f"{place}: cosine {row.cosine:.7f}, norm {norm} of the expected, largest error {share} of the row's maximum"


def cluster_text(item: Cluster) -> str:
    """Which indices of an axis hold mismatches, the fullest first."""
    what = "mismatches" if item.unit == "elements" else "wrong rows"
    spread = f"{item.indices:,} of {item.extent:,} hold {what}"
    if item.indices == item.extent and item.extent > 1:
        spread = f"all {item.extent:,} hold {what}"
    fullest = ", ".join(f"{index} ({count:,} of {elements:,})" for index, count, elements in item.top)
    return f"{spread}: {fullest}{', …' if item.indices > len(item.top) else ''}"


def needed_text(item: Comparison) -> str:
    """The smallest limits that would pass: of elements, and those of cosine and norm that would have to be wider than they are."""
    if item.needed is None:
        return "none"
    parts = [] if item.needed.elements_exact() and item.needed_factor else [item.needed.text()]
    if item.failing.cosine and item.needed.cosine is not None:
        parts.append(f"cosine {item.needed.cosine:.7f}")
    if item.failing.norm and item.needed.norm is not None:
        parts.append(f"norm {item.needed.norm:.4g}")
    return " ".join(parts) or "exact"


def bisection_lines(found: Bisection) -> list[tuple[str, str]]:
    """(label, text) lines of what `--bisect` tried and found."""
    lines = [("", step) for step in found.steps]
    lines += [(item.name, f"{_fit(item)}: {item.text}") for item in found.hypotheses]
    return lines + ([("", f"smallest failing capture: {found.smallest}")] if found.smallest else [])


def _fit(item: Hypothesis) -> str:
    if item.reproduces:
        return "reproduces"
    if not item.tested:
        return "not tested"
    largest = max(item.factor, item.lse_factor or 0.0)
    return f"off by {largest:.3g}x the tolerance" if largest < 1e30 else "further off than any tolerance"
