"""What plain data and planning may cost: no module that a listing needs imports torch, the compiler or numpy."""

import subprocess
import sys

import pytest

LIGHT = (
    "mlactl.errors",
    "mlactl.profiles",
    "mlactl.kernels.spec",
    "mlactl.kernels.registry",
    "mlactl.kernels.envelope",
    "mlactl.kernels.compiler",
    "mlactl.kernels.runtime",
    "mlactl.cache.store",
    "mlactl.cache.adapters",
    "mlactl.cache.own",
    "mlactl.cache.foreign.b12x.adapter",
    "mlactl.cache.load",
    "mlactl.cache.publish",
    "mlactl.cache.advisories",
    "mlactl.cache.audit",
    "mlactl.cache.machine_code",
    "mlactl.cache.bundle.merge",
    "mlactl.cache.bundle.places",
    "mlactl.cache.bundle.write",
    "mlactl.opening",
    "mlactl.warmup.plan",
    "mlactl.warmup.pool",
    "mlactl.warmup.worker",
    "mlactl.cache.survey",
    "mlactl.doctor.examination",
    "mlactl.cli.doctor",
    "mlactl.scales.needs",
    "mlactl.bench.computed",
    "mlactl.bench.objects",
    "mlactl.bench.record",
    "mlactl.cli.bench",
    "mlactl.ui.output",
    "mlactl.cli.app",
)

HEAVY = ("torch", "cutlass", "numpy", "tvm_ffi", "rich")


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_stays_light(module):
    code = f"import sys, {module}; print(*sorted(sys.modules.keys() & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_planning_a_whole_profile_stays_light():
    """From profile file to missing keys: the toolchain in a key is read from installed files, not by importing it."""
    code = f"""
import sys
from mlactl.cache.store import Store
from mlactl.profiles import load
from mlactl.warmup.plan import make_plan
plan = make_plan(load("kimi-k3-tp8-dcp8-bf16"), ("sm_120a", "sm_121a"), Store.open("/nonexistent/cache"))
print([item.state for item in plan.items] == ["missing"] * 2 * len(plan.profile.specs()), *sorted(sys.modules.keys() & {set(HEAVY)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
