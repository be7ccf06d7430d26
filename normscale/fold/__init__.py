"""Folding for inference: gains, biases and means of norms go into the weights beside them, exactly or not at all."""

from normscale.fold.folding import Folding, fold
from normscale.fold.form import Form

__all__ = ["Folding", "Form", "fold"]
