"""normscale: how deep a Transformer can go before training breaks, and why."""

__version__ = "0.1.0"
