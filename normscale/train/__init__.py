"""Training: one step on one screen, engines, optimizers, and the life of a run."""
