"""Captured attention calls: record them, run them again, and say whether a kernel is right."""
