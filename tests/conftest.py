"""What every test shares: this folder is on the import path, property tests are not timed, and Ctrl-C works."""

import signal

from hypothesis import HealthCheck, settings

# A busy machine must not fail a property: how long an example takes is not what is tested.
settings.register_profile("mlactl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mlactl")

# A job that a shell starts in the background ignores Ctrl-C, as would every process it starts; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
