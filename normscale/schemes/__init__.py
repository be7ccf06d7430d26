"""Normalisation schemes, one file each; a file here is found by itself, no list is edited."""

from normscale.schemes.registry import find_scheme, register, scheme_names
from normscale.schemes.scheme import Depth, Make, Own, Parts, Role, Scheme, Site, Streams

__all__ = [
    "Depth",
    "Make",
    "Own",
    "Parts",
    "Role",
    "Scheme",
    "Site",
    "Streams",
    "find_scheme",
    "register",
    "scheme_names",
]
