"""A cache warmed for the scale 1.0 and a deployment with real scales: the check names the variant that is missing."""

from __future__ import annotations

import json

import pytest

from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Store
from mlactl.profiles import load

# The compiler warns of long unrolled loops; it is run in this process here, not in a worker.
pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")

PROFILE = """\
name = "small"
[model]
heads = 16
layers = 2
latent_dim = 512
rope_dim = 64
draft_layers = 0
[parallel]
tp = 1
dcp = 1
[kv]
record = "nvfp4_ds_mla_432"
page_size = 64
kv_dtype = "uint8"
q_dtype = "bf16"
[serving]
modes = ["prefill"]
max_sequences = 1
top_k = 2048
"""


@pytest.mark.parametrize(("warmed", "scales", "missing"), [(1, [0.37, 0.9], 0), (0, [1.0, 1.00000001], 1)])
def test_check_names_the_variant_that_a_scale_file_needs_and_the_cache_lacks(cli, tmp_path, warmed, scales, missing):
    """On a node warmed with 1.0 identity kernels once served layers with real scales; here the check fails and says which."""
    path = tmp_path / "small.toml"
    path.write_text(PROFILE)
    (warm,) = load(str(path)).specs((warmed,))
    compile_and_publish(Store.open(str(cli.cache_dir)), warm, "sm_120a")
    file = tmp_path / "scales.json"
    file.write_text(
        json.dumps({"format": "nvfp4_ds_mla_outer_scale_v1", "num_layers": 2, "latent_dim": 512, "denominator": 2688.0, "scales": scales})
    )
    done = cli("warmup", "--check", "--profile", path, "--arch", "sm_120a", "--scales", file)
    assert done.code == 1
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("missing: ")]
    assert len(lines) == 1
    assert f"attention.mla.sm120.prefill_mg 4 latent_scale_identity={missing}" in lines[0]
    # Without the file it would compile the other variant too.
    assert f"hint: mlactl warmup --profile {path} --arch sm_120a --scales {file}" in done.stderr
    file.write_text(file.read_text().replace(json.dumps(scales), json.dumps([1.0, 1.0] if warmed else [0.5, 0.5])))
    assert cli("warmup", "--check", "--profile", path, "--arch", "sm_120a", "--scales", file).code == 0
