"""What a deployment can ever launch, in the kernels' own terms, and the compile specs that cover it.

A profile is turned into envelopes by `mlactl.profiles`; capacities and sizes do not appear in specs, so an envelope
says only what forks code. Imports neither torch nor the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlactl.kernels import registry
from mlactl.kernels.mla import policy, sparse_policy
from mlactl.kernels.spec import CompileSpec


@dataclass(frozen=True, slots=True)
class DenseEnvelope:
    """Dense MLA launches of one deployment.

    `heads` is what the kernel sees (after the DCP gather); `verify_rows` the rows a request (K+1) of each planned draft
    depth; `per_query` whether verify rows carry their own visible lengths (DCP); `sparse` whether the strided chunk
    selection may be switched on.
    """

    modes: tuple[str, ...]
    heads: int
    verify_rows: tuple[int, ...]
    record: str
    q_dtype: str
    width: int
    per_query: bool
    window: bool
    sparse: bool


@dataclass(frozen=True, slots=True)
class SparseEnvelope:
    """Sparse MLA launches over selected slots; `identities` are the latent-scale variants the layers need."""

    modes: tuple[str, ...]
    heads: int
    record: str
    q_dtype: str
    identities: tuple[int, ...]


Envelope = DenseEnvelope | SparseEnvelope


def enumerate_specs(envelope: Envelope) -> tuple[CompileSpec, ...]:
    """Every spec the envelope can launch, validated, without repeats, in a fixed order."""
    specs = policy.dense_specs(envelope) if isinstance(envelope, DenseEnvelope) else sparse_policy.sparse_specs(envelope)
    unique = tuple(dict.fromkeys(specs))
    for spec in unique:
        registry.validate(spec)
    return unique
