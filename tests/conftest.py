"""What every test shares: this folder is on the import path, and property tests are not timed."""

from hypothesis import HealthCheck, settings

# A busy machine must not fail a property: how long an example takes is not what is tested.
settings.register_profile("mlactl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mlactl")
