"""Which kernel variants a scale file makes a deployment launch, so that warmup compiles exactly those.

Imports neither torch nor numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mlactl.scales.outer import load_outer_scales

if TYPE_CHECKING:
    from mlactl.profiles import Profile


def identities_needed(path: Path, profile: Profile) -> tuple[int, ...]:
    """Values of the fact `latent_scale_identity` that the file's layers and the profile's draft layers launch, ascending.

    0 is the dynamic variant, 1 the identity one. Raises CannotRun for an unreadable file and InvalidScales for one that
    is wrong or does not fit the profile: warming for a file that must not be served would hide that.
    """
    return load_outer_scales(path, profile).identities
