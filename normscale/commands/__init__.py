"""The commands: each says what it has to and calls the rest of the package, which it imports when it runs."""
