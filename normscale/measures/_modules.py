"""What measurements do to the modules of a model."""

from torch import nn


def without(model: nn.Module, kind: type[nn.Module]) -> None:
    """Puts the identity where modules of a kind were."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, kind):
                module._modules[name] = nn.Identity()
