"""Which modules of a model are its blocks, in the order of depth."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from normscale.errors import BadInput, nearest
from normscale.probes.names import plain_name

Blocks = str | Sequence[str | nn.Module] | None

_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # which are never called

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # where wrappers keep the module


_NUMBERED = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


def is_deepspeed(thing: Any) -> bool:
    """Returns whether something is an engine of DeepSpeed, or works like one."""
    return callable(getattr(thing, "was_step_applied", None)) and hasattr(thing, "global_steps")


def inner_of(model: nn.Module) -> nn.Module:
    """Returns the module that its owner wrote, out of the wrappers of DDP, DeepSpeed and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel) or is_deepspeed(model):
            model = cast(nn.Module, model.module)
        elif "_orig_mod" in model._modules:
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


def refuse(inner: nn.Module) -> None:
    """Raises BadInput for a wrapper whose gradients nobody could read."""
    for name, own in (*inner.named_parameters(), *inner.named_buffers()):
        if is_lazy(own):
            raise BadInput(
                f"Monitor: {name!r} has no shape yet (a lazy module); run one forward pass before the monitor is made"
            )
    for name, module in inner.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            where = f"{name!r} is" if name else "the model is"
            raise BadInput(f"Monitor: {where} wrapped in FullyShardedDataParallel (FSDP1); use fully_shard (FSDP2)")


def find_blocks(inner: nn.Module, wanted: Blocks) -> dict[str, nn.Module]:
    """Returns the blocks by name, in the order of depth.

    Args:
        inner: The model, out of its wrappers.
        wanted: None finds the outermost lists (ModuleList or Sequential) whose members are of one class, all of them
            in the order of the model; without such a list the model's own children are taken. A string is a regular
            expression that whole names of modules match; a sequence holds names or modules; an empty one asks for none.

    Raises:
        BadInput: a name or module is not in the model, or no name matches.
    """
    named: dict[str, nn.Module] = {}
    for name, module in inner.named_modules():
        named.setdefault(plain_name(name), module)  # a wrapper comes before what it holds
    if wanted is None:
        return _found(inner, named)
    if isinstance(wanted, nn.Module) and not isinstance(wanted, nn.ModuleList | nn.Sequential):
        raise BadInput(f"Monitor(blocks=...): is a {type(wanted).__name__}; give a list of modules, as [module]")
    if not isinstance(wanted, Iterable):
        mend = "names or modules in a list, a regular expression, () or None"
        raise BadInput(f"Monitor(blocks={wanted!r}): is a {type(wanted).__name__}; give {mend}")
    if isinstance(wanted, str):
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            mend = r"give one that names match, as 'h\.\d+'"
            raise BadInput(f"Monitor(blocks={wanted!r}): is no regular expression ({error}); {mend}") from None
        chosen = {name: module for name, module in named.items() if pattern.fullmatch(name)}
        if not chosen:
            raise BadInput(f"Monitor(blocks={wanted!r}): matches no module; names are as {_examples(named)}")
        return chosen
    return dict(_one(item, named) for item in wanted)


def stack_starts(names: Sequence[str]) -> list[int]:
    """Returns where stacks begin among the names of blocks: a stack is what comes before the first number in them."""
    stacks = [_NUMBERED.split(name)[0] if _NUMBERED.search(name) else None for name in names]
    return [i for i, stack in enumerate(stacks) if i == 0 or stack != stacks[i - 1]]


class Places:
    """Where modules stand in a model, to see which of them were taken out."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner
        self._find()

    def gone(self, modules: Iterable[nn.Module]) -> list[bool]:
        """Returns for each module whether it is no longer in the model."""
        modules = list(modules)
        gone = self._gone(modules)
        if any(gone):
            self._find()  # it may stand elsewhere, as in a wrapper
            gone = self._gone(modules)
        return gone

    def _find(self) -> None:
        self._above = {
            child: (parent, key)
            for parent in self.inner.modules()
            for key, child in parent._modules.items()
            if child is not None
        }

    def _gone(self, modules: Sequence[nn.Module]) -> list[bool]:
        stands = {self.inner: True}

        def standing(module: nn.Module) -> bool:
            if module not in stands:
                parent, key = self._above.get(module, (None, ""))
                stands[module] = parent is not None and parent._modules.get(key) is module and standing(parent)
            return stands[module]

        return [not standing(module) for module in modules]


def _one(item: str | nn.Module, named: dict[str, nn.Module]) -> tuple[str, nn.Module]:
    if isinstance(item, str):
        if item not in named:
            hint = nearest(item, list(named)) or f"; names are as {_examples(named)}"
            raise BadInput(f"Monitor(blocks=...): the model has no module {item!r}{hint}")
        return item, named[item]
    for name, module in named.items():
        if module is item or _opened(module) is item:
            return name, module
    raise BadInput(f"Monitor(blocks=...): a {type(item).__name__} that was given is no module of the model")


def _found(inner: nn.Module, named: dict[str, nn.Module]) -> dict[str, nn.Module]:
    stacks: list[dict[str, nn.Module]] = []
    inside: list[str] = []  # beginnings of names that lie in a block already
    for name, module in named.items():
        if name.startswith(tuple(inside)) or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        stack = {f"{name}.{key}" if name else key: member for key, member in module.named_children()}
        classes = {type(_opened(member)) for member in stack.values()}
        one_class = len(classes) == 1 and not any(issubclass(kind, _HOLDERS) for kind in classes)
        enough = len(stack) > 1 or isinstance(module, nn.ModuleList)
        if enough and one_class and any(_has_parameters(member) for member in stack.values()):
            stacks.append(stack)
            inside += [f"{block}." for block in stack]
    deep = [stack for stack in stacks if any(len(_opened(block)._modules) for block in stack.values())]
    chosen = {name: block for stack in deep or stacks for name, block in stack.items()}
    called = {name: child for name, child in inner.named_children() if not isinstance(_opened(child), _HOLDERS)}
    children = {plain_name(name): child for name, child in called.items() if _has_parameters(child)}
    return chosen or children or {"": inner}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _opened(module: nn.Module) -> nn.Module:
    for key in _WRAPPED:
        if key in module._modules:
            return _opened(getattr(module, key))
    return module


def _examples(named: dict[str, nn.Module]) -> str:
    names = [name for name in named if name]
    return ", ".join(names[1:6] or names) or "(the model has no modules)"
