"""Of several values that are not finite, the one that is to blame is named: what had no part is passed over."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscale.errors import ReplayRefused
from normscale.probes.chance import Sources
from normscale.probes.culprit import LOSS
from normscale.probes.mend import large, mended
from normscale.probes.replay import Kept, replay
from tests.probes.test_replay import Log, Net, Spoil, SpoilBack, batches, culprit_of, found, spoilt


class Overflows(nn.Module):
    """Two layers, behind the second of which everything overflows, after something of its own."""

    def __init__(self, begin: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.begin = nn.Linear(4, 4), nn.Linear(4, 4), begin

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.begin(x)) * 1e30) * 1e30  # type: ignore[no-any-return]


def test_padding_that_the_model_drops_is_not_to_blame() -> None:
    given = spoilt(batches()[0], math.nan)
    culprit = culprit_of(Overflows(torch.nan_to_num), [given])
    assert (culprit.phase, culprit.module, culprit.tensor, culprit.nan) == ("forward", "", "output", 0)
    assert "before it, in input[0] of the model itself (Overflows), had no part in it" in culprit.note
    assert culprit_of(Overflows(lambda x: x), [given]).tensor == "input[0]"


class Complex(nn.Module):
    """Two layers with complex weights and outputs, of which the second overflows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(4, 4, dtype=torch.cfloat) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x.to(torch.cfloat)) * 1e30) * 1e30).abs()  # type: ignore[no-any-return]


def test_the_fault_of_complex_numbers_is_named() -> None:
    model = Complex()
    assert culprit_of(model, batches()).module == ""  # what follows b, in the model's own forward
    with torch.no_grad():
        model.b.weight[0, 0] = complex(1e30, 0.0)
    assert (culprit_of(model, batches()).module, culprit_of(model, batches()).phase) == ("b", "forward")
    with torch.no_grad():
        model.a.weight[0, 0] = complex(0.0, math.nan)
    culprit = culprit_of(model, batches())
    assert (culprit.module, culprit.phase, culprit.tensor, culprit.nan) == ("a", "parameter", "weight", 1)


def test_what_no_mend_changes_is_to_blame_after_one_more_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscale.probes.watch.mended", lambda x: x)
    culprit = culprit_of(Overflows(torch.log), [-batches()[0].abs()])
    assert (culprit.phase, culprit.module, culprit.tensor) == ("forward", "", "input[0] of 'a'")
    assert "had no part" not in culprit.note


def test_what_a_harmless_value_spoils_on_its_way_is_passed_over_with_it() -> None:
    class Dropped(Overflows):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.a(x)[:, :1].nan_to_num() + x.nan_to_num())

    assert culprit_of(Dropped(lambda x: x), [spoilt(batches()[0], math.nan)]).tensor == "output"


def test_infinite_distances_that_a_softmin_leaves_out_are_not_to_blame() -> None:
    class Softmin(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.distances = nn.ModuleList([nn.Identity() for _ in range(layers)])
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for one in self.distances:
                x = torch.softmax(-one(x.square().masked_fill(torch.eye(3, 4).bool(), math.inf)), dim=-1)
            return self.last(x) * 1e30 * 1e30  # type: ignore[no-any-return]

    for layers in (1, 4):
        culprit = culprit_of(Softmin(layers))
        assert (culprit.module, culprit.tensor) == ("", "output")
        assert culprit.note.startswith("in its own operations, after 'last'")
        assert (" and " in culprit.note) == (layers > 1)


def test_labels_that_the_loss_leaves_out_are_not_to_blame() -> None:
    model = Net()
    batch = [batches()[0], spoilt(torch.ones(3, 2), math.nan)]

    def masked(batch: list[Tensor]) -> Tensor:
        return ((model(batch[0]) - batch[1]) ** 2).nan_to_num().mean()

    culprit = culprit_of(model, [batch], lambda batch: (masked(batch) * 0).log())
    assert (culprit.phase, culprit.module, culprit.tensor) == ("loss", LOSS, "loss")
    culprit = culprit_of(model, [batch], lambda batch: ((model(batch[0]) - batch[1]) ** 2).mean())
    assert (culprit.phase, culprit.tensor) == ("data", "batch[1]")
    culprit = culprit_of(model, [batch], masked)  # 0 * NaN in the backward of the square
    assert (culprit.phase, culprit.tensor) == ("data", "batch[1]")
    assert found(model, [batch], lambda batch: ((model(batch[0]) - batch[1].nan_to_num()) ** 2).mean()) is None


def test_of_two_faults_on_ways_of_their_own_the_earlier_is_named() -> None:
    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inlet, self.one, self.two = nn.Linear(4, 4), Spoil(math.nan), Spoil(math.nan)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inlet(x)
            return self.one(x) + self.two(x)  # type: ignore[no-any-return]

    assert culprit_of(Ways()).module == "one"


def test_a_plain_fault_costs_one_pass_more() -> None:
    passes = []
    model = Net(a=Spoil(math.nan))

    def loss_of(batch: Tensor) -> Tensor:
        passes.append(1)
        return model(batch).square().mean()  # type: ignore[no-any-return]

    culprit_of(model, None, loss_of)
    assert len(passes) == 2


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_pass_that_fails_leaves_the_first_event(all_of_them: bool) -> None:
    model, calls = Net(a=Spoil(math.nan)), []

    def loss_of(batch: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        return model(batch).square().mean()  # type: ignore[no-any-return]

    culprit = culprit_of(model, None, loss_of, all_of_them=all_of_them)
    assert culprit.module == "middle.a"
    assert culprit.note.startswith("it is the first event; whether it had a part was not tried")


# What stands in place of a bad value brings no fault of its own.


def test_a_tensor_of_nan_alone_that_is_divided_by_its_norm() -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inlet, self.bad, self.unit = nn.Linear(4, 4), nn.Identity(), Unit()

        def forward(self, x: Tensor) -> Tensor:
            return self.unit(self.bad(self.inlet(x) * math.nan))  # type: ignore[no-any-return]

    class Unit(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.norm()

    assert culprit_of(Divided()).tensor == "input[0] of 'bad'"


def test_an_overflow_in_fp16_that_is_squared() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.square = Doubled(), Square()

        def forward(self, x: Tensor) -> Tensor:
            return self.square(self.bad(x.half())).float()  # type: ignore[no-any-return]

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0 + 40000) * 2

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square()

    assert culprit_of(Squared()).module == "bad"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_mended_is_finite_with_its_square_and_its_logarithm(dtype: torch.dtype) -> None:
    x = mended(torch.tensor([math.nan, math.inf, -math.inf, 3.0], dtype=dtype))
    assert x.tolist() == [0.5, large(dtype), -large(dtype), 3.0]
    assert torch.isfinite(x.square()).all()
    assert x[2].float().exp() == 0


# Parameters and buffers.


class Owner(nn.Module):
    """Takes the logarithm of negative numbers, or multiplies by what it owns."""

    def __init__(self, kind: str, value: float, read: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, own = read, torch.ones(4)
        own[1] = value
        if kind == "buffer":
            self.register_buffer("own", own)
        else:
            self.own = nn.Parameter(own)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x * self.own if self.read else torch.log(-x.abs()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_a_module_owns_is_named_where_it_was_read(kind: str, value: float) -> None:
    model = Owner(kind, value, read=True)
    culprit = culprit_of(model)
    assert (culprit.phase, culprit.module, culprit.tensor) == ("parameter", "", "own")
    assert (culprit.nan, culprit.pos_inf, culprit.of) == (int(math.isnan(value)), int(value == math.inf), 4)
    assert not torch.isfinite(model.own[1])
    culprit = culprit_of(Owner(kind, value, read=False))
    assert (culprit.phase, culprit.tensor) == ("forward", "input[0] of 'b'")


def test_running_averages_are_named_only_where_they_are_read() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[1].running_mean.fill_(math.nan)  # type: ignore[operator,union-attr]
    model[1].weight.data.fill_(3e38)
    assert [culprit_of(model).tensor, culprit_of(model).module] == ["output", "1"]
    model[1].weight.data.fill_(1.0)
    assert found(model) is None
    culprit = culprit_of(model.eval())
    assert (culprit.phase, culprit.module, culprit.tensor) == ("parameter", "1", "running_mean")


def test_an_expert_that_was_not_called_is_not_to_blame() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[0](x) * torch.log(-x[:, :1].abs())  # type: ignore[no-any-return]

    model = Experts()
    model.experts[2].weight.data[0, 0] = math.nan  # type: ignore[union-attr,operator,index]
    culprit = culprit_of(nn.Sequential(model))
    assert (culprit.phase, culprit.module, culprit.tensor) == ("forward", "0", "output")


@pytest.mark.parametrize(("bad", "named"), [(("weight", "bias"), "weight"), (("unread", "bias"), "bias")])
def test_of_several_the_first_that_was_read_is_named(bad: tuple[str, ...], named: str) -> None:
    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self._parameters = {"unread": nn.Parameter(torch.ones(4)), **self._parameters}

    layer = Layer()
    with torch.no_grad():
        for name in bad:
            layer._parameters[name].view(-1)[0] = math.nan  # type: ignore[union-attr]
    assert culprit_of(Net(a=layer)).tensor == named


# Weights that modules share.


class Tied(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.middle, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight, self.scale = self.table.weight, scale
        self.table.weight.data *= 1e-3

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.table(tokens)) * self.scale)  # type: ignore[no-any-return]


def test_the_module_whose_own_gradient_of_a_shared_weight_is_bad_is_named() -> None:
    model = Tied(1e24)
    weight = model.table.weight
    culprit = culprit_of(model, [torch.arange(5)[None]], lambda batch: (model(batch) * 1e15).sum())
    assert (culprit.module, culprit.tensor, culprit.kind) == ("head", "gradient of weight", "+Inf")
    assert model.head.weight is weight is model.table.weight
    assert isinstance(weight, nn.Parameter)
    assert not weight._backward_hooks


def test_a_sum_over_the_modules_that_share_a_weight_is_told_from_each() -> None:
    class Times(nn.Module):
        def __init__(self, gain: nn.Parameter) -> None:
            super().__init__()
            self.gain = gain

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    gain = nn.Parameter(torch.ones(()))
    model = nn.ModuleDict({"one": Times(gain), "two": Times(gain)})
    culprit = culprit_of(model, [torch.ones(())], lambda x: model["one"](x) * 2e38 - 3e38 + model["two"](x) * 2e38)
    assert (culprit.phase, culprit.tensor, culprit.kind) == ("backward", "gradient of gain", "+Inf")
    assert culprit.note == "the sum over 'one', 'two', which share it"


def test_a_shared_weight_is_lent_for_the_call_alone() -> None:
    seen: list[bool] = []

    class Looks(Tied):
        def forward(self, tokens: Tensor) -> Tensor:
            out = super().forward(tokens)
            seen.append(self.head.weight is self.table.weight)
            return out

    assert found(Looks(1.0), [torch.arange(5)[None]]) is None
    assert seen == [True]


def test_a_model_that_raises_has_its_shared_weights_back() -> None:
    class Raises(Tied):
        def forward(self, tokens: Tensor) -> Tensor:
            self.head.register_forward_pre_hook(self.raising)
            return super().forward(tokens)

        def raising(self, *_: Any) -> None:
            raise ValueError("mine")

    model = Raises(1.0)
    with pytest.raises(ValueError, match="mine"):
        found(model, [torch.arange(5)[None]])
    assert model.head.weight is model.table.weight
    assert isinstance(model.head.weight, nn.Parameter)


def test_a_call_that_an_exception_ended_is_over() -> None:
    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.a = nn.Linear(3, 3), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(RuntimeError):
                self.bad(x)
            return self.a(x * math.inf)  # type: ignore[no-any-return]

    culprit = culprit_of(Catches())
    assert (culprit.module, culprit.tensor) == ("", "input[0] of 'a'")


# What a window begins with.


def test_a_micro_batch_that_was_written_to_since_is_told() -> None:
    model = nn.Linear(4, 2)
    buffer = spoilt(batches()[0], math.nan)
    kept = [Kept.of({"x": buffer}, Sources())]
    buffer.zero_()
    with pytest.raises(ReplayRefused, match=r"micro-batch 0 was written to after it ran.*a batch of its own"):
        replay(model, kept, lambda batch: model(batch["x"]).sum())
    culprit = replay(model, kept, lambda batch: model(batch["x"]).sum() * math.inf)
    assert culprit is not None
    assert culprit.note == "the micro-batch was written to after it ran: the replay had other numbers"
    kept = [Kept.of({"x": torch.zeros(1, 4)}, Sources())]
    assert replay(model, kept, lambda batch: model(batch["x"]).sum()) is None


@pytest.mark.parametrize("all_of_them", [False, True])
def test_every_pass_of_a_micro_batch_has_the_buffers_it_had(all_of_them: bool) -> None:
    seen: list[float] = []

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(float(self.count))
            self.count = self.count + 1  # another tensor, not the same one written to
            return torch.where(self.count == 2, math.nan, x)

    model = Net(a=Counts())
    culprit = culprit_of(model, batches(2), all_of_them=all_of_them)
    assert (culprit.micro_batch, culprit.module) == (1, "middle.a")
    assert seen == ([0, 1, 0, 1] if all_of_them else [0, 1, 1])
    assert float(model.middle.a.count) == 0  # type: ignore[arg-type]


def test_a_loss_that_tells_is_explained_although_another_micro_batch_is_refused() -> None:
    from tests.probes.test_replay import Recomputing

    model = Recomputing(True)
    given = batches(2)
    culprit = culprit_of(model, [given[0], spoilt(given[1], math.nan)])
    assert (culprit.micro_batch, culprit.phase) == (1, "data")
    with pytest.raises(ReplayRefused, match="use_reentrant=False"):
        found(model, given, all_of_them=True)
    assert culprit_of(model, [spoilt(given[1], math.nan)], all_of_them=True).phase == "data"


def test_where_a_finite_loss_hides_it_masks_are_still_told_from_faults() -> None:
    assert culprit_of(nn.Sequential(nn.Linear(4, 4), Log(), nn.LayerNorm(4))).module == "1"
    assert culprit_of(Net(b=SpoilBack(math.inf))).module == "middle.b"
