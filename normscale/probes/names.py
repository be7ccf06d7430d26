"""The names of modules and parameters as the model's owner knows them."""

from torch import nn

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # the parts of names that wrappers add
_SHARDING = "torch.distributed.fsdp"


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Returns every module's name as the model's owner knows it, without what wrappers add; "" is the model."""
    return {module: plain_name(name) for name, module in model.named_modules()}


def kind_of(module: nn.Module) -> str:
    """Returns the class of a module as its owner wrote it: `fully_shard` puts one of its own in its place."""
    classes = type(module).__mro__
    return next((own.__name__ for own in classes if not own.__module__.startswith(_SHARDING)), classes[0].__name__)


def plain_name(name: str) -> str:
    """Returns the name of a module or parameter without what wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
