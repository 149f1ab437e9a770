"""Names in the signatures of b12x's Triton kernels."""


class constexpr:
    """An annotation only."""
