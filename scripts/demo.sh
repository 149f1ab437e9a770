#!/bin/sh
# The whole path on a machine without a GPU: warm real profiles, list, show, verify, audit, carry, find damage, prune by version.
# Works in .demo/ only; `make demo` puts the project's environment in PATH.
set -eu
cd "$(dirname "$0")/.."
cache=.demo/cache
rm -rf .demo
mkdir .demo
unset MLACTL_CACHE_DIR

say() { printf '\n== %s\n' "$1"; }
run() { printf '$ %s\n' "$*"; "$@"; }
expect() { # the exit code a step must have, then the step
  wanted=$1; shift
  printf '$ %s\n' "$*"
  code=0; "$@" || code=$?
  printf '(exit code %s)\n' "$code"
  if [ "$code" != "$wanted" ]; then echo "demo: expected exit code $wanted" >&2; exit 1; fi
}

say "Compile every kernel this deployment can launch, for two arches, with no GPU"
run mlactl profile show kimi-k3-tp8-dcp8-bf16
expect 1 mlactl warmup --profile kimi-k3-tp8-dcp8-bf16 --arch sm_120a --arch sm_121a --check --cache-dir $cache
expect 0 mlactl warmup --profile kimi-k3-tp8-dcp8-bf16 --arch sm_120a --arch sm_121a --cache-dir $cache
expect 0 mlactl warmup --profile kimi-k3-tp8-dcp8-bf16 --arch sm_120a --arch sm_121a --check --cache-dir $cache

say "See what is there"
run mlactl cache ls --cache-dir $cache
key=$(mlactl cache ls -q --kernel attention.dense_mla.forward --arch sm_120a --cache-dir $cache | head -n 1)
run mlactl cache show "$(printf %.12s "$key")" --cache-dir $cache

say "Check every object against its manifest and its own machine code"
expect 0 mlactl cache verify --cache-dir $cache

say "Audit kernels that exist in two variants: does the code read the latent scale, as its key says"
expect 0 mlactl warmup --profile glm-5.2-tp4-dcp4 --arch sm_120a --cache-dir .demo/sparse
expect 0 mlactl cache audit --cache-dir .demo/sparse
key_sparse=$(mlactl cache ls -q --kernel attention.mla.sm120.decode --cache-dir .demo/sparse | head -n 1)
expect 0 mlactl cache audit "$(printf %.12s "$key_sparse")" --cache-dir .demo/sparse

say "Carry it to a node without the compiler"
expect 0 mlactl cache export -o .demo/glm.tar.zst --profile glm-5.2-tp4-dcp4 --arch sm_120a --cache-dir .demo/sparse
expect 0 mlactl cache import .demo/glm.tar.zst --cache-dir .demo/node

say "Damage a copy: one byte of one object"
cp -r $cache .demo/damaged
printf '\377' | dd of=".demo/damaged/v1/$(printf %.2s "$key")/$key.so" bs=1 seek=20000 conv=notrunc status=none
expect 1 mlactl cache verify --cache-dir .demo/damaged
expect 0 mlactl cache verify --repair --cache-dir .demo/damaged
expect 0 mlactl cache verify --cache-dir .demo/damaged

say "Prune what an upgrade left: an entry of a superseded spec version"
python scripts/superseded_entry.py $cache
expect 0 mlactl cache prune --dry-run --cache-dir $cache
expect 0 mlactl cache prune --yes --cache-dir $cache
expect 0 mlactl cache prune --dry-run --cache-dir $cache

say "Next"
cat <<'TXT'
  mlactl warmup --profile NAME                 warm this machine's own cache (mlactl profile ls shows the names)
  mlactl cache why --profile NAME              why a lookup would miss
  mlactl cache verify --reproduce              prove that objects come from these sources
  mlactl doctor --profile NAME                 is this node fit to serve (exit 3 here when there is no GPU)
  MLACTL_FROZEN=1                              in a serving process: a miss is an error, never a compile
TXT
