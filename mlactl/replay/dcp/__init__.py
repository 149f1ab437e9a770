"""Captures of the ranks of one decode-context-parallel call: merged by LSE, held against the unsharded call."""
