"""Where a compile worker hangs its listener."""

from types import SimpleNamespace

compilation = SimpleNamespace(listener=None)
