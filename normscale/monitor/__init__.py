"""Probes for anyone's training loop: which value went bad first, and what depth does to the numbers."""

from normscale.monitor.monitor import Monitor
from normscale.monitor.report import StepReport

__all__ = ["Monitor", "StepReport"]
