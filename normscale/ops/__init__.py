"""One operation a file; the eager function is the definition, the oracle of every kernel and the CPU path."""
