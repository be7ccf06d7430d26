"""Norm functions, one file each; a file here is found by itself, no list is edited."""

from normscale.norms.norm import Norm, find_norm, norm_names, register, seen_before, set_backend

__all__ = ["Norm", "find_norm", "norm_names", "register", "seen_before", "set_backend"]
