"""Triton kernel bodies. Nothing here is imported before a kernel is asked for: normscale runs without Triton."""
