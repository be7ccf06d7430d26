"""The replay names the first value that was not finite, wherever one is put, and leaves everything as it was."""

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normscale.errors import ReplayRefused
from normscale.probes import watch
from normscale.probes.buffers import AllBuffers
from normscale.probes.chance import RandomState, Sources
from normscale.probes.culprit import LOSS, Culprit
from normscale.probes.replay import Kept, replay

VALUES = (math.nan, math.inf, -math.inf)
KINDS = {math.inf: "+Inf", -math.inf: "-Inf"}


def kind_of(value: float) -> str:
    return KINDS.get(value, "NaN")


def spoilt(x: Tensor, value: float) -> Tensor:
    """`x` with `value` in two places."""
    return torch.where(torch.arange(x.numel()).view(x.shape).remainder(x.numel() // 2) == 1, value, x)


class Spoil(nn.Module):
    """The identity, with `value` in two places."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return spoilt(x, self.value)


class SpoiltBack(torch.autograd.Function):
    """The identity, whose gradient has `value` in two places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return spoilt(gradients[0], ctx.value), None


class SpoilBack(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return SpoiltBack.apply(x, self.value)  # type: ignore[no-any-return]


def doubled(x: Tensor) -> Tensor:
    return x * 2


class Middle(nn.Module):
    """a, then something of its own, then b, then something of its own; any of them may be exchanged."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.LayerNorm(4)
        self.between: Callable[[Tensor], Tensor] = doubled
        self.last: Callable[[Tensor], Tensor] = doubled
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b(self.between(self.a(x))))


class Net(nn.Module):
    """A Middle between two layers."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.head = nn.Linear(4, 4), Middle(**parts), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.relu(self.first(x))))  # type: ignore[no-any-return]


def batches(n: int = 1) -> list[Tensor]:
    return list(torch.randn(n, 3, 4, generator=torch.Generator().manual_seed(1)))


def found(
    model: nn.Module,
    given: list[Any] | None = None,
    loss_of: Callable[[Any], Tensor] | None = None,
    **settings: Any,
) -> Culprit | None:
    kept = [Kept(batch, RandomState.capture(Sources())) for batch in given or batches()]
    return replay(model, kept, loss_of or (lambda batch: model(batch).square().mean()), **settings)


def culprit_of(model: nn.Module, *args: Any, **settings: Any) -> Culprit:
    culprit = found(model, *args, **settings)
    assert culprit is not None
    return culprit


def test_a_finite_step_has_no_culprit() -> None:
    assert found(Net(), batches(3)) is None


# Every kind of place.


@pytest.mark.parametrize("value", VALUES)
def test_an_activation(value: float) -> None:
    culprit = culprit_of(Net(a=Spoil(value)))
    assert (culprit.phase, culprit.module, culprit.type, culprit.tensor) == ("forward", "middle.a", "Spoil", "output")
    counts = (culprit.nan, culprit.pos_inf, culprit.neg_inf)
    assert counts == tuple(2 * (kind_of(value) == kind) for kind in ("NaN", "+Inf", "-Inf"))
    assert (culprit.kind, culprit.of, culprit.micro_batch, culprit.rank) == (kind_of(value), 12, 0, 0)
    assert (culprit.device, culprit.reproduced, culprit.beside) == ("cpu", True, None)


@pytest.mark.parametrize("value", VALUES)
def test_a_modules_own_operation_before_a_child(value: float) -> None:
    culprit = culprit_of(Net(between=lambda x: spoilt(x, value)))
    where = (culprit.phase, culprit.module, culprit.type, culprit.tensor, culprit.beside)
    assert where == ("forward", "middle", "Middle", "input[0] of 'b'", "middle.b")
    assert culprit.kind == kind_of(value)
    assert culprit.note.startswith("in its own operations, between 'a' and 'b'")


@pytest.mark.parametrize("value", VALUES)
def test_a_modules_own_operation_after_its_last_child(value: float) -> None:
    culprit = culprit_of(Net(last=lambda x: spoilt(x, value)))
    assert (culprit.module, culprit.tensor, culprit.kind) == ("middle", "output", kind_of(value))
    assert culprit.note.startswith("in its own operations, after 'b'")


@pytest.mark.parametrize("value", VALUES)
def test_the_backward_of_a_module(value: float) -> None:
    culprit = culprit_of(Net(b=SpoilBack(value)))
    where = (culprit.phase, culprit.module, culprit.tensor, culprit.kind)
    assert where == ("backward", "middle.b", "gradient of input[0]", kind_of(value))
    assert (culprit.nan + culprit.pos_inf + culprit.neg_inf, culprit.of) == (2, 12)
    assert culprit.note == ""


@pytest.mark.parametrize("value", VALUES)
def test_the_backward_of_a_modules_own_operation(value: float) -> None:
    culprit = culprit_of(Net(between=lambda x: SpoiltBack.apply(x, value)))
    where = (culprit.phase, culprit.module, culprit.type, culprit.tensor, culprit.beside)
    assert where == ("backward", "middle", "Middle", "gradient of output of 'a'", "middle.a")
    assert culprit.note == "in the backward of its own operations, after 'a'"


def test_the_backward_of_the_loss() -> None:
    model = Net()
    culprit = culprit_of(model, None, lambda batch: SpoiltBack.apply(model(batch), math.inf).sum())
    assert (culprit.phase, culprit.module, culprit.kind) == ("backward", LOSS, "+Inf")
    assert culprit.where() == "the loss, outside the model"


class WeightBack(nn.Linear):
    """A layer whose weight alone gets a bad gradient."""

    value = math.nan

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, SpoiltBack.apply(self.weight, self.value), self.bias)


@pytest.mark.parametrize("value", VALUES)
def test_the_gradient_of_a_weight_alone(value: float) -> None:
    layer = WeightBack(4, 4)
    layer.value = value
    culprit = culprit_of(Net(a=layer))
    where = (culprit.phase, culprit.module, culprit.tensor, culprit.kind)
    assert where == ("backward", "middle.a", "gradient of weight", kind_of(value))


@pytest.mark.parametrize("value", VALUES)
def test_a_parameter(value: float) -> None:
    model = Net()
    with torch.no_grad():
        model.middle.a.weight[0, 1] = value  # type: ignore[index]
    culprit = culprit_of(model)
    where = (culprit.phase, culprit.module, culprit.tensor, culprit.kind, culprit.of)
    assert where == ("parameter", "middle.a", "weight", kind_of(value), 16)


def test_a_parameter_of_a_module_that_its_parent_uses_and_never_calls() -> None:
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    with torch.no_grad():
        model.out_proj.bias[0] = math.nan
    x = torch.randn(2, 3, 4)
    culprit = culprit_of(model, [x], lambda batch: model(batch, batch, batch)[0].sum())
    assert (culprit.phase, culprit.module, culprit.tensor) == ("parameter", "", "out_proj.bias")


def test_a_row_of_a_table_that_nobody_reads_is_no_culprit() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.bad = nn.Embedding(5, 4), Spoil(math.nan)
            with torch.no_grad():
                self.table.weight[4] = math.nan

        def forward(self, tokens: Tensor) -> Tensor:
            return self.bad(self.table(tokens))  # type: ignore[no-any-return]

    assert culprit_of(Table(), [torch.tensor([0, 1, 2])]).module == "bad"


@pytest.mark.parametrize("value", VALUES)
def test_the_data(value: float) -> None:
    culprit = culprit_of(Net(), [spoilt(batches()[0], value)])
    assert (culprit.phase, culprit.module, culprit.tensor) == ("data", "", "input[0]")
    assert culprit.kind == kind_of(value)


@pytest.mark.parametrize("value", VALUES)
def test_the_loss(value: float) -> None:
    model = Net()
    culprit = culprit_of(model, None, lambda batch: model(batch).mean() + value)
    assert (culprit.phase, culprit.module, culprit.tensor) == ("loss", LOSS, "loss")
    assert culprit.kind == kind_of(value)


def test_data_that_only_the_loss_reads() -> None:
    model = Net()
    batch = {"x": batches()[0], "y": torch.full((3, 2), math.nan)}
    culprit = culprit_of(model, [batch], lambda batch: F.mse_loss(model(batch["x"]), batch["y"]))
    assert (culprit.phase, culprit.module, culprit.tensor) == ("data", LOSS, "batch.y")


def test_the_micro_batch_and_the_propagators() -> None:
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.where(x[0, 0] > 90, torch.inf, 0.0)

    given = batches(4)
    given[2] = given[2] + 100
    model = Net()
    model.first = Sometimes()  # type: ignore[assignment]
    culprit = culprit_of(model, given)
    assert (culprit.micro_batch, culprit.module) == (2, "first")
    assert culprit.propagators == ("middle.a", "middle.b", "middle", "head", "")


def test_of_two_faults_in_one_pass_the_earlier_is_named_and_orders_compare() -> None:
    both = Net(a=Spoil(math.nan), last=lambda x: spoilt(x, math.inf))
    early, late = Net(a=Spoil(math.nan)), Net(last=lambda x: spoilt(x, math.inf))
    assert culprit_of(both).order == culprit_of(early).order < culprit_of(late).order
    assert culprit_of(late).order < culprit_of(Net(b=SpoilBack(math.inf))).order


# Masks.


class Attention(nn.Module):
    """One head, with the scores as the output of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.out = Scores(), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(torch.softmax(self.scores(x, mask), dim=-1) @ x)  # type: ignore[no-any-return]


class Scores(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x @ x.mT / 2 + mask


class Masked(nn.Module):
    """A mask made outside or inside, two layers of attention, and one place that may go wrong."""

    def __init__(self, bad: nn.Module | None = None, made_inside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made_inside, self.inlet = made_inside, nn.Linear(4, 4)
        self.one, self.bad, self.two = Attention(), bad or nn.Identity(), Attention()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.made_inside:
            mask = alibi()
        return self.two(self.bad(self.one(self.inlet(x), mask)), mask)  # type: ignore[no-any-return]


def alibi() -> Tensor:
    """A causal mask with finite slopes where one may look."""
    distance = torch.arange(3)[:, None] - torch.arange(3)
    return torch.where(distance < 0, -math.inf, -0.5 * distance)


def masked(model: nn.Module, mask: Tensor | None = None) -> Culprit | None:
    loss = lambda batch: model(batch[0], mask=batch[1]).square().mean()  # noqa: E731
    return found(model, [(batches()[0], alibi() if mask is None else mask)], loss)


@pytest.mark.parametrize("made_inside", [False, True])
def test_a_mask_is_no_event(made_inside: bool) -> None:
    assert masked(Masked(made_inside=made_inside)) is None


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("bad", [Spoil(math.nan), Spoil(math.inf), Spoil(-math.inf), SpoilBack(math.nan)])
def test_a_mask_is_not_blamed_for_a_fault_elsewhere(bad: nn.Module, made_inside: bool) -> None:
    culprit = masked(Masked(bad, made_inside))
    assert culprit is not None
    assert culprit.module == "bad"
    assert culprit.kind == kind_of(bad.value)  # type: ignore[arg-type]


def test_a_mask_that_leaves_a_row_nothing_is_named() -> None:
    culprit = masked(Masked(), alibi().index_fill(0, torch.tensor(1), -math.inf))
    assert culprit is not None
    assert (culprit.phase, culprit.tensor, culprit.kind) == ("data", "input.mask", "-Inf")
    assert culprit.note == "with finite numbers in its place what follows is finite"


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.relu(x))


class Half(nn.Module):
    """A product that overflows to -Inf in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.half() * 0 - 60000) * 2


@pytest.mark.parametrize("bad", [Log(), Half()])
def test_a_logarithm_of_nothing_and_an_overflow_are_no_masks(bad: nn.Module) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.bad, self.norm = nn.Linear(4, 4), bad, nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.bad(self.first(x)).float())  # type: ignore[no-any-return]

    culprit = culprit_of(Model())
    assert (culprit.module, culprit.kind, culprit.tensor) == ("bad", "-Inf", "output")
    assert culprit.propagators[0] == "norm"


@pytest.mark.parametrize("layers", [3, 40])
def test_among_many_masks_the_one_overflow_is_found(layers: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inlet = nn.Linear(4, 4)
            self.layers = nn.ModuleList([Attention() for _ in range(layers)])
            self.norms = nn.ModuleList([nn.LayerNorm(4) for _ in range(layers)])
            self.bad = Spoil(-math.inf)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inlet(x)
            for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
                x = norm(x + layer(self.bad(x) if i == layers - 2 else x, alibi()))
            return x

    passes = []
    model = Model()

    def loss_of(batch: Tensor) -> Tensor:
        passes.append(1)
        return model(batch).square().mean()  # type: ignore[no-any-return]

    assert culprit_of(model, None, loss_of).module == "bad"
    assert len(passes) <= 2 + math.ceil(math.log2(4 * layers))


class Unused(nn.Module):
    """Has a NaN on the way forward that the loss does not use, and something else that may go wrong."""

    def __init__(self, after: nn.Module, used_back: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.harmless, self.after, self.used_back = nn.Linear(4, 4), Spoil(math.nan), after, used_back
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        y = self.harmless(x.flip(0)).flip(0)  # in other places than `SpoilBack` has
        if self.used_back:
            y = y * self.gain  # 0 * NaN is what the gain gets
        return self.after(torch.where(torch.isfinite(y), y, 0.0))  # type: ignore[no-any-return]


def test_a_value_that_a_finite_loss_did_not_use_is_no_fault_unless_it_spoils_the_way_back() -> None:
    assert found(Unused(nn.Identity())) is None
    assert culprit_of(Unused(SpoilBack(math.inf))).module == "after"
    culprit = culprit_of(Unused(nn.Identity(), used_back=True))
    assert (culprit.phase, culprit.module, culprit.kind) == ("forward", "harmless", "NaN")


def test_a_gradient_that_goes_nowhere_is_no_fault() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inlet, self.back = nn.Linear(4, 4), SpoilBack(math.inf)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inlet(x)
            return self.back(torch.where(spoilt(x, math.inf) == math.inf, 0.0, x))  # type: ignore[no-any-return]

    assert found(Model()) is None


# Any module.


@dataclass
class Output:
    h: Tensor
    aux: Tensor | None = None


@pytest.mark.parametrize("wrap", [lambda x: {"h": x}, Output, lambda x: [x.long(), (x,)]])
def test_outputs_of_any_form(wrap: Callable[[Tensor], Any]) -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return wrap(spoilt(x, math.nan))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.after = Block(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = self.block(x)
            x = out["h"] if isinstance(out, dict) else out.h if isinstance(out, Output) else out[1][0]
            return self.after(x)  # type: ignore[no-any-return]

    culprit = culprit_of(Model())
    assert culprit.module == "block"
    assert culprit.tensor in ("output.h", "output[1][0]")


def test_gradients_of_dictionaries_are_seen() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"h": self.linear(x)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return SpoiltBack.apply(self.block(x)["h"], math.inf)  # type: ignore[no-any-return]

    culprit = culprit_of(Model())
    assert (culprit.module, culprit.tensor, culprit.beside) == ("", "gradient of output.h of 'block'", "block")


def test_a_module_called_twice_is_told_by_the_order_of_its_call() -> None:
    class Twice(nn.Module):
        def __init__(self, bad: int) -> None:
            super().__init__()
            self.layer, self.bad = nn.Linear(4, 4), bad

        def forward(self, x: Tensor) -> Tensor:
            for i in range(3):
                x = self.layer(x if i != self.bad else spoilt(x, math.inf))
            return x

    first, last = (culprit_of(Twice(bad)) for bad in (0, 2))
    assert first.module == last.module == ""
    assert first.tensor == last.tensor == "input[0] of 'layer'"
    assert first.order < last.order
    assert last.note == "in its own operations, between 'layer' and 'layer'"


def test_shared_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.table.weight
            self.middle = SpoilBack(math.nan)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.middle(self.table(tokens)))  # type: ignore[no-any-return]

    culprit = culprit_of(Tied(), [torch.tensor([0, 1, 2])])
    assert (culprit.module, culprit.tensor) == ("middle", "gradient of input[0]")


@pytest.mark.parametrize("inplace", [lambda y: y.add_(1), lambda y: y.mul_(2), F.silu])
@pytest.mark.parametrize("bad", [None, 1])
def test_operations_in_place_after_a_block(inplace: Callable[[Tensor], Tensor], bad: int | None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.relu = nn.ReLU(inplace=True)
            for block in self.blocks:
                nn.init.constant_(block.bias, 9.0)  # type: ignore[arg-type]  # so that it lets the gradient through

        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = self.relu(inplace(block(x)))
                x = SpoiltBack.apply(x, math.inf) if i == bad else x
            return x

    culprit = found(Model())
    if bad is None:
        assert culprit is None
    else:
        assert culprit is not None
        assert (culprit.phase, culprit.module, culprit.beside) == ("backward", "", "relu")


def test_arguments_that_a_module_writes_to_are_the_callers() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            seen.append(x)
            return x * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.writes, self.bad = nn.Linear(4, 4), Writes(), Spoil(math.nan)

        def forward(self, x: Tensor) -> Tensor:
            seen: list[Tensor] = []
            self.writes(self.first(x), seen)
            return self.bad(seen[0])  # type: ignore[no-any-return]

    assert culprit_of(Model()).module == "bad"


# Checkpointing and compiling.


class Recomputing(nn.Module):
    def __init__(self, reentrant: bool, **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.recomputed, self.inlet = reentrant, True, nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Middle(), Middle(**parts), Middle()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.recomputed else block(x)
        return x


@pytest.mark.parametrize(
    ("parts", "module", "tensor"),
    [
        ({"b": Spoil(math.inf)}, "blocks.1.b", "output"),
        ({"b": Spoil(-math.inf), "last": nn.LayerNorm(4)}, "blocks.1.b", "output"),
        ({"between": lambda x: spoilt(x, math.nan)}, "blocks.1", "input[0] of 'b'"),
        ({"b": SpoilBack(math.nan)}, "blocks.1.b", "gradient of input[0]"),
        ({"between": lambda x: SpoiltBack.apply(x, math.inf)}, "blocks.1", "gradient of output of 'a'"),
    ],
)
def test_recomputed_blocks_are_seen_once(parts: dict[str, Any], module: str, tensor: str) -> None:
    plain, recomputing = Net(**parts), culprit_of(Recomputing(False, **parts))
    assert (recomputing.module, recomputing.tensor) == (module, tensor)
    assert culprit_of(plain).tensor == tensor


def test_a_recomputed_forward_is_no_second_one() -> None:
    orders = []
    for recomputed in (False, True):
        model = Recomputing(False)
        model.blocks[0].b = SpoilBack(math.inf)  # behind two blocks that are recomputed before it
        model.recomputed = recomputed
        orders.append(culprit_of(model).order)
    assert orders[0] == orders[1]


def test_two_arguments_that_are_one_stay_one() -> None:
    class Pair(nn.Module):
        def forward(self, a: Tensor, b: Tensor, *, c: Tensor) -> Tensor:
            return a * (1.0 if a is b is c else math.nan)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inlet, self.pair = nn.Linear(4, 4), Pair()

        def forward(self, x: Tensor) -> Tensor:
            x = self.inlet(x)
            return self.pair(x, x, c=x)  # type: ignore[no-any-return]

    assert found(Model()) is None


def test_what_is_mended_is_mended_in_the_recomputation_too() -> None:
    model = Unused(nn.Identity(), used_back=True)
    model.harmless.value = -math.inf
    culprit = culprit_of(model, None, lambda x: checkpoint(model, x, use_reentrant=False).square().mean())
    assert (culprit.phase, culprit.module, culprit.kind) == ("forward", "harmless", "-Inf")


def test_reentrant_checkpointing_is_refused_where_the_loss_does_not_tell() -> None:
    assert culprit_of(Recomputing(True, b=Spoil(math.inf))).module == "blocks.1.b"
    model = Recomputing(True)
    with pytest.raises(ReplayRefused, match="use_reentrant=False"):
        found(model, None, lambda batch: SpoiltBack.apply(model(batch), math.inf).sum())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_compiled_model_is_replayed_eagerly() -> None:
    model = Recomputing(False, b=Spoil(math.inf))
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    model(batches()[0])
    assert culprit_of(model).module == "blocks.1.b"
    whole = Net(a=Spoil(math.nan))
    wrapped = torch.compile(whole, backend="eager")
    wrapped(batches()[0])
    culprit = culprit_of(wrapped)
    assert (culprit.module, culprit.type) == ("middle.a", "Spoil")


# What it leaves.


def test_a_fault_that_random_numbers_bring_about_is_reproduced() -> None:
    class Unlucky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (torch.rand(()) > 0.5)

    model = Net(a=Unlucky(), b=nn.Dropout(0.5))
    torch.manual_seed(3)
    kept, lucky = [], []
    for batch in batches(8):
        kept.append(Kept(batch, RandomState.capture(Sources())))
        lucky.append(bool(torch.isfinite(model(batch)).all()))
    assert True in lucky
    assert False in lucky
    culprit = replay(model, kept, lambda batch: model(batch).square().mean())
    assert culprit is not None
    assert (culprit.micro_batch, culprit.module) == (lucky.index(False), "middle.a")


def test_pythons_and_numpys_numbers_are_drawn_again_too() -> None:
    drawn: list[tuple[float, float]] = []

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            drawn.append((random.random(), float(np.random.rand())))  # noqa: NPY002
            return x

    model = Net(a=Draws())
    kept = Kept(batches()[0], RandomState.capture(Sources()))
    model(kept.batch)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]  # noqa: NPY002
    replay(model, [kept], lambda batch: model(batch).sum())
    assert drawn[0] == drawn[1]
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index,union-attr]  # noqa: NPY002


@pytest.mark.parametrize("bad", [None, Spoil(math.nan), SpoilBack(math.inf), Spoil(-math.inf)])
def test_nothing_is_left_changed(bad: nn.Module | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), bad or nn.Identity(), nn.LayerNorm(4))
    model(batches()[0]).sum().backward()
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    given = batches(2)
    kept = [Kept(batch, RandomState.capture(Sources())) for batch in given]
    torch.rand(3)
    generator = torch.get_rng_state()
    replay(model, kept, lambda batch: model(batch).square().mean())
    for before, after in zip(state.values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    for before, p in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(generator, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


def test_random_states_are_put_back_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: AllBuffers) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(AllBuffers, "put_back", failing)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    kept = Kept(batches()[0], RandomState.capture(Sources()))
    torch.rand(3)
    generator = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no room"):
        replay(model, [kept], lambda batch: model(batch).square().mean())
    assert torch.equal(generator, torch.get_rng_state())


class Heads(nn.Module):
    """Attention that asks whether its arguments are one tensor, and uses the weights of a module it never calls."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.attention, self.dropout = nn.Linear(4, 4), nn.MultiheadAttention(4, 2), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        return self.dropout(self.attention(x, x, x)[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_losses_and_gradients_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    model = Heads(dropout)
    kept = Kept(batches()[0], RandomState.capture(Sources()))
    loss = model(kept.batch).square().mean()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    seen: list[Any] = []
    grad = torch.autograd.grad

    def spy(loss: Tensor, parameters: list[Tensor], **settings: Any) -> Any:
        seen.append((loss.detach(), dict(zip(map(id, parameters), grad(loss, parameters, **settings), strict=True))))
        return tuple(seen[-1][1].values())

    monkeypatch.setattr(torch.autograd, "grad", spy)
    assert replay(model, [kept], lambda batch: model(batch).square().mean()) is None
    assert torch.equal(seen[0][0], loss.detach())
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(seen[0][1][id(p)], gradient)


def test_all_of_them_are_run_to_their_end() -> None:
    model = Net(a=Spoil(math.nan))
    runs: list[int] = []

    def loss_of(batch: Tensor) -> Tensor:
        runs.append(1)
        return model(batch).square().mean()  # type: ignore[no-any-return]

    assert culprit_of(model, batches(3), loss_of, all_of_them=True).micro_batch == 0
    assert len(runs) == 6  # the second time with the first event mended
    model.middle.a.value = -math.inf  # type: ignore[union-attr]
    assert culprit_of(model, batches(3), loss_of, all_of_them=True).kind == "-Inf"
    assert len(runs) % 3 == 0


@pytest.mark.parametrize("together", [False, True])
def test_what_fails_in_a_pass_that_would_try_an_event_is_said(together: bool) -> None:
    model = Net(a=Spoil(math.nan))
    runs: list[int] = []

    def loss_of(batch: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) > 1:
            raise ValueError("no room")
        return model(batch).square().mean()  # type: ignore[no-any-return]

    culprit = culprit_of(model, batches(), loss_of, all_of_them=together)
    assert culprit.module == "middle.a"
    assert culprit.note.endswith("whether it had a part was not tried: ValueError: no room")


def test_a_hook_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = watch.counted

    def failing(x: Tensor) -> Any:
        if x.shape == (3, 2):  # what the head gives
            raise ValueError("no")
        return counted(x)

    monkeypatch.setattr(watch, "counted", failing)
    culprit = culprit_of(Net(a=Spoil(math.nan)))
    assert culprit.module == "middle.a"
    assert culprit.note == "a hook failed (ValueError: no)"


def test_only_the_parameters_that_are_asked_for_count() -> None:
    model = Net(a=WeightBack(4, 4))
    assert found(model, parameters=[model.head.weight]) is None
    assert found(model, parameters=[model.middle.a.weight]) is not None  # type: ignore[union-attr,list-item]


def test_sparse_gradients_and_integers() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.bad = nn.Embedding(5, 4, sparse=True), SpoilBack(math.nan)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.bad(self.table(tokens))  # type: ignore[no-any-return]

    assert culprit_of(Table(), [torch.tensor([0, 1, 1])]).module == "bad"
