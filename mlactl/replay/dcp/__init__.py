"""Captures of the ranks of one decode-context-parallel call: merged by LSE, held against the unsharded call."""

from mlactl.replay.dcp.groups import Group, find_groups, group_reports
from mlactl.replay.dcp.merge import merge_results
from mlactl.replay.dcp.unsharded import unsharded

__all__ = ["Group", "find_groups", "group_reports", "merge_results", "unsharded"]
