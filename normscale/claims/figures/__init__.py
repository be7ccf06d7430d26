"""The figure of a claim, drawn from stored records alone; a module for each kind."""
