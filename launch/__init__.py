"""Where commands run: each launcher renders a command that the user can also see, and runs it. Imports no torch."""
