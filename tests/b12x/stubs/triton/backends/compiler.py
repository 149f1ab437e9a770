"""The target that a compile worker describes."""

from collections import namedtuple

GPUTarget = namedtuple("GPUTarget", "backend arch warp_size")
