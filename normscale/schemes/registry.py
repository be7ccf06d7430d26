"""The registry of the schemes in this folder."""

import normscale.schemes as package
from normscale.registry import Registry
from normscale.schemes.scheme import Scheme

SCHEMES: Registry[Scheme] = Registry(package, "scheme", "model.scheme")
register, scheme_names, find_scheme = SCHEMES.register, SCHEMES.names, SCHEMES.find
