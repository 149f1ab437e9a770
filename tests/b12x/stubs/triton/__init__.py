"""Just enough of triton for b12x to be imported and to compile its CuTe kernels: none of its Triton kernels is ever built here."""


def jit(function=None, **_options):
    """The function as it is, never compiled."""
    return function if function is not None else lambda decorated: decorated


def cdiv(dividend, divisor):
    """Rounded up."""
    return -(-dividend // divisor)
