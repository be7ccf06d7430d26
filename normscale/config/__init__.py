"""The configuration of a run: schema, files and overrides, and where each value was written. Imports no torch.

`load.load` and `load.read` read one, `load.revise` changes one, `load.dump` writes one, `keys.describe` lists the keys.
Nothing is re-exported: a function `load` here would hide the module of that name.
"""
