"""What training runs on: `engine` is the contract, `make` chooses one, and each of the others is one.

Nothing is re-exported.
"""
