"""Normalisation schemes, one file each; a file here is found by itself, no list is edited."""

from normscale.schemes.registry import find_scheme, register, scheme_names
from normscale.schemes.scheme import Depth, Make, Own, Parts, Role, Scheme, Site, Streams, Weight

__all__ = [
    "Depth",
    "Make",
    "Own",
    "Parts",
    "Role",
    "Scheme",
    "Site",
    "Streams",
    "Weight",
    "find_scheme",
    "register",
    "scheme_names",
]
