"""A page about every scheme: what it is, what it does at initialisation, what the records of claims say of it."""
