"""Measurements: numbers that take no training, one file each.

A file here, `NAME.py`, defines `measure(seed, ...)`: keyword arguments with types, as a claim's arms name them, and
numbers as {name: number}. It draws whatever it draws from the seed. `run` does it as a run: with an identity, a record
in the folder of runs, and nothing done twice.
"""
