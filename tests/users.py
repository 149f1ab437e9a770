"""Which user runs the tests, and one that owns nothing."""

import os
import pwd

import pytest

NOBODY = 65534
ME = f"{pwd.getpwuid(os.geteuid()).pw_name} (uid {os.geteuid()})"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="drops to another user, which only root can do")
