"""What depth does to a model that is not ours, against plain torch in fp64 over everything that was measured."""

import math
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscale
from normscale.errors import BadInput
from normscale.monitor import logits, norms
from normscale.monitor.gathered import Gathered
from normscale.ops.sampled import spread
from tests.monitor.made import Net, adamw, batches, events, hooks, loss_fn, net, record, train
from tests.monitor.test_loops import Fake


class Seen:
    """What modules are given and put out as they run, each as one [rows, D] in fp64."""

    def __init__(self, *modules: nn.Module) -> None:
        self.given: dict[nn.Module, Tensor] = {}
        self.out: dict[nn.Module, Tensor] = {}
        for module in modules:
            module.register_forward_pre_hook(
                lambda m, args, kwargs: self._add(self.given, m, *args, *kwargs.values()), with_kwargs=True
            )
            module.register_forward_hook(lambda m, args, out: self._add(self.out, m, out))

    def _add(self, rows: dict[nn.Module, Tensor], module: nn.Module, x: Any, *rest: Any) -> None:
        x = x[0] if isinstance(x, tuple) else x
        own = x.detach().double().flatten(0, -2).clone()
        rows[module] = torch.cat([rows[module], own]) if module in rows else own


class InPlace(nn.Module):
    """A block that works in place, and takes its stream by name, beside other things."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Any:
        return hidden_states.add_(self.proj(hidden_states.clone()).tanh()), mask


class ByName(Net):
    def __init__(self) -> None:
        super().__init__(3)
        self.blocks = nn.ModuleList(InPlace() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x, _ = block(hidden_states=x.clone(), mask=torch.ones(1))
        return self.head(x)


@pytest.mark.parametrize("kind", ["accumulated", "in place"])
def test_turns_and_branches_are_those_of_what_blocks_are_given_and_put_out(kind: str, tmp_path: Path) -> None:
    model = net(4) if kind == "accumulated" else ByName()
    monitor = normscale.Monitor(model, runs=tmp_path)
    seen = Seen(*model.blocks)
    train(model, monitor, batches(2, rows=7), 2)
    pairs = [(seen.given[block], seen.out[block]) for block in model.blocks]
    turned = [torch.arccos(torch.cosine_similarity(x, y, dim=-1)).mean() / math.pi for x, y in pairs]
    ratios = [float((y - x).norm() / y.norm()) for x, y in pairs]
    found = record(monitor)
    np.testing.assert_allclose(found.profiles["angle_online"].data[0], torch.stack(turned), rtol=1e-6)
    np.testing.assert_allclose(found.profiles["branch_ratio"].data[0], ratios, rtol=1e-6)
    assert found.series["branch_p50"].values == pytest.approx([np.median(ratios)])
    assert min(turned) > 0.01


def test_sampled_rows_are_spread_over_sequences_and_positions(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    monitor = normscale.Monitor(model, runs=tmp_path, blocks=["0"])
    x = torch.randn(9, 50, 4)
    with monitor.micro_batch():
        loss = model(x).square().mean()
        loss.backward()
    y = spread(model[0](x).detach()).double()
    monitor.step(torch.optim.SGD(model.parameters(), 0.0), loss)
    cosine = torch.cosine_similarity(spread(x).double(), y, dim=-1)
    assert y.shape == (4, 4, 4)
    wanted = float(torch.arccos(cosine).mean()) / math.pi
    assert record(monitor).profiles["angle_online"].data[0, 0] == pytest.approx(wanted, rel=1e-5)


def test_blocks_that_change_the_shape_have_no_angle(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 2, 1))
    monitor = normscale.Monitor(model, runs=tmp_path, blocks=["0", "1", "3"])
    train(model, monitor, batches(1))
    angles = record(monitor).profiles["angle_online"].data[0]
    assert np.isnan(angles).tolist() == [True, False, True]


class RmsNorm(nn.Module):
    """As models have it whose stream is in half precision; `zero_centred` as Gemma has it."""

    def __init__(self, eps: float, zero_centred: bool = False, outside: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.3, 0.5, 8) + float(not zero_centred))
        self.variance_epsilon, self.zero_centred, self.outside = eps, zero_centred, outside

    def forward(self, x: Tensor) -> Tensor:
        var, eps = x.square().mean(-1, keepdim=True), self.variance_epsilon
        y = x / (var.sqrt() + eps) if self.outside else x * (var + eps).rsqrt()
        return y * (1 + self.weight if self.zero_centred else self.weight)


class Norms(nn.Module):
    """Norms of all kinds one after another, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        rms, plain = nn.RMSNorm(8), nn.LayerNorm(8, eps=0.2, elementwise_affine=False)
        unbiased = nn.LayerNorm(8, eps=0.1, bias=False)
        own = [nn.LayerNorm(8, eps=0.5), unbiased, plain, rms, RmsNorm(0.3), RmsNorm(0.4, zero_centred=True)]
        self.norms = nn.ModuleList([*own, RmsNorm(2.0, outside=True)])
        self.unused = nn.LayerNorm(8)
        with torch.no_grad():
            own[0].bias.normal_()  # type: ignore[union-attr, operator]
            unbiased.weight.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm in self.norms:
            x = 0.5 * norm(x) + 0.3
        return x


def shadow(x: Tensor, norm: Any) -> list[float]:
    """The numbers of a norm by its own forward, with other eps; x [R, 8] in fp64."""
    own = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    eps = getattr(norm, own)
    value = torch.finfo(torch.float32).eps if eps is None else eps
    outs = []
    for each in (value, 10 * value, value / 10):
        setattr(norm, own, each)
        outs.append(norm.double()(x).detach())
    setattr(norm, own, eps)
    norm.float()
    at, up, down = outs
    var = x.var(-1, correction=0) if isinstance(norm, nn.LayerNorm) else x.square().mean(-1)
    gain = (var + value).rsqrt().sort().values
    shares = [float((value > part * var).double().mean()) for part in (0.01, 0.1)]
    changes = [float((other - at).norm() / at.norm()) for other in (up, down)]
    return [*changes, *shares, float(gain[(len(gain) - 1) // 2]), float(gain[-1])]


def test_epsilon_of_norms_is_that_of_their_own_forward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Norms()
    monitor = normscale.Monitor(model, runs=tmp_path, blocks=["embed"])
    seen = Seen(*model.norms)
    first, second = batches(2, rows=9)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for batch in (first, 100 * second):  # of which the first alone is looked at
        with monitor.micro_batch():
            loss = model(batch).square().mean()
            loss.backward()
        with suppress(RuntimeError), monitor.micro_batch():
            model(batch).view(-1, 7)  # which its size does not allow
    monitor.step(optimizer, loss)
    wanted = np.array([shadow(seen.given[norm][:9], norm) for norm in model.norms])
    found = record(monitor)
    names = ("eps_up", "eps_down", "eps_share_1", "eps_share_10", "eps_gain_p50", "eps_gain_max")
    table = np.stack([found.profiles[name].data[0] for name in names], axis=1)
    assert found.start["norms"] == [f"norms.{i}" for i in range(7)] + ["unused"]
    assert set(found.start["profile_rows"].values()) == {"norms"}
    np.testing.assert_allclose(table[:6], wanted[:6], rtol=1e-5)
    assert np.isnan(table[6:]).all()  # eps outside of the root, and a norm that is not called
    assert found.series["eps_change_max"].values == pytest.approx([wanted[:6, 0].max()], rel=1e-5)
    assert wanted[:6, 0].min() < 1e-5 < 0.1 < wanted[:6, 0].max()


def test_tensors_of_several_devices_are_not_stacked() -> None:
    seen: list[tuple[list[int], str, int]] = []
    gathered = Gathered(
        lambda indices, common, stacked: seen.append(([*indices], stacked[0].device.type, len(stacked)))
    )
    for index, device in enumerate(("cpu", "meta", "cpu")):
        gathered.add(index, None, (torch.zeros(2, 3, device=device), torch.zeros(2, 3)))
    gathered.flush()
    assert seen == [([0, 2], "cpu", 2), ([1], "meta", 2)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_x", [False, True])
def test_the_eps_that_torch_takes_by_itself_is_the_one_it_adds(
    of_x: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer versions of torch take fp32's for half precision, others that of the input."""
    monkeypatch.setattr(norms, "_default_eps", norms._default_eps.__wrapped__)
    rms_norm = nn.functional.rms_norm

    def of_the_input(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
        return rms_norm(x, shape, weight, torch.finfo(x.dtype).eps if eps is None else eps)

    if of_x:
        monkeypatch.setattr(nn.functional, "rms_norm", of_the_input)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8)).to(dtype)
    monitor = normscale.Monitor(model, runs=tmp_path, blocks=["0"])
    seen = Seen(model[1])
    batch = batches(1)[0].to(dtype)
    with monitor.micro_batch():
        loss = model(batch).float().square().mean()
        loss.backward()
    monitor.step(torch.optim.SGD(model.parameters(), 0.0), loss)
    x = seen.given[model[1]]
    tiny = torch.full((1, 8), 2.0**-14 if dtype.itemsize == 2 else 1e-12, dtype=dtype)
    added = float((tiny.double() / model[1](tiny).detach().double()).square().mean())
    found = record(monitor).profiles["eps_up"].data[0][0]
    y = [x * (x.square().mean(-1, keepdim=True) + each).rsqrt() for each in (added, 10 * added)]
    assert found == pytest.approx(float((y[1] - y[0]).norm() / y[0].norm()), rel=0.05)


@pytest.mark.gpu
def test_a_model_over_several_devices_has_all_numbers(tmp_path: Path) -> None:
    """The host is one of them, which is as good as a second GPU."""

    class Apart(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x.to(block.proj.weight.device))
            return self.head(x.to(self.head.weight.device))

    tables = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = Apart(4)
        for block in model.blocks:
            block.drop.p = 0.0
        model.blocks[1:3].to(device)
        monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=1, logits="head", clip=0.1)
        train(model, monitor, batches(3))
        found = record(monitor)
        assert events(found, "probe_off") == []
        tables.append(found.profiles)
    assert set(tables[0]) == set(tables[1])
    for name in ("angle_online", "branch_ratio", "eps_up", "stream_rms", "grad_norm", "update_rel"):
        np.testing.assert_allclose(tables[1][name].data, tables[0][name].data, rtol=1e-2, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("form", ["attribute", "key", "tuple", "module"])
def test_log_z_is_that_of_all_positions(form: str, tmp_path: Path) -> None:
    class Head(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x).unflatten(0, (2, 3))
            named = {"attribute": SimpleNamespace(logits=y), "key": {"aux": None, "logits": y}, "tuple": (y, None)}
            return named.get(form, y)

    torch.manual_seed(0)
    model = Head(2)
    told = {"tuple": "", "module": "head"}.get(form)
    monitor = normscale.Monitor(model, runs=tmp_path, logits=told)
    sums: list[Tensor] = []
    model.head.register_forward_hook(lambda m, args, y: sums.append(y.detach().double().exp().sum(-1).log().flatten()))
    total = torch.zeros(())
    for batch in batches(2, rows=6):
        with monitor.micro_batch():
            x = model.embed(batch) if form == "module" else None
            y = model(batch) if x is None else model.head(model.blocks[1](model.blocks[0](x)))
            y = y.logits if form == "attribute" else y["logits"] if form == "key" else y[0] if form == "tuple" else y
            loss = y.square().mean()
            loss.backward()
    monitor.step(adamw(model), total)
    series = record(monitor).series
    assert series["logz_mean"].values == pytest.approx([float(torch.cat(sums).mean())], rel=1e-6)
    assert series["logz_max"].values == pytest.approx([float(torch.cat(sums).max())], rel=1e-6)


def test_of_many_logits_few_positions_are_widened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(logits, "ENTRIES", 100)
    monkeypatch.setattr(logits, "LEAST", 2)
    model = nn.Sequential(nn.Linear(4, 50))
    monitor = normscale.Monitor(model, runs=tmp_path, blocks=(), logits="")
    x = torch.randn(3, 5, 4)
    with monitor.micro_batch():
        loss = model(x).square().mean()
        loss.backward()
    wanted = spread(model(x).detach(), 2, 2).double().logsumexp(-1)
    assert wanted.numel() == 2
    monitor.step(torch.optim.SGD(model.parameters(), 0.0), loss)
    assert record(monitor).series["logz_mean"].values == pytest.approx([float(wanted.mean())], rel=1e-6)


def test_a_module_of_logits_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = net(2)
    with pytest.raises(BadInput, match=r"Monitor\(logits='haed'\): the model has no such module; did you mean 'head'"):
        normscale.Monitor(model, runs=tmp_path / "runs", logits="haed")
    with pytest.raises(BadInput, match="give the name of a module"):
        normscale.Monitor(model, runs=tmp_path / "runs", logits=model.head)  # type: ignore[arg-type]
    assert not hooks(model)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_share_of_adams_epsilon_is_that_of_its_state(amsgrad: bool, tmp_path: Path) -> None:
    model = net(3)
    monitor = normscale.Monitor(model, runs=tmp_path, every=3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.98), eps=2e-2, amsgrad=amsgrad)
    train(model, monitor, batches(3), optimizer=optimizer)
    shares, taken = [], []
    for block in model.blocks:
        states = [optimizer.state[p] for p in block.parameters()]
        seconds = [state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"] for state in states]
        root = torch.cat([(v.double() / (1 - 0.98**3)).sqrt().flatten() for v in seconds])
        first = torch.cat([state["exp_avg"].double().abs().flatten() for state in states])
        shares.append(float((root < 2e-2).double().mean()))
        taken.append(1 - float((first / (root + 2e-2)).sum() / (first / root).sum()))
    found = record(monitor)
    np.testing.assert_allclose(found.profiles["adam_eps_share"].data[-1], shares, rtol=1e-6)
    np.testing.assert_allclose(found.profiles["adam_eps_taken"].data[-1], taken, rtol=1e-4)
    assert found.series["adam_eps_share"].values[-1] == pytest.approx(np.mean(shares), rel=1e-6)
    assert 0.02 < min(shares) < max(shares) < 1


def test_what_a_model_does_not_show_is_said(tmp_path: Path) -> None:
    """And a record has no profile of zeros in its place."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = Fake(model, 1.0)
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    for batch in batches(2):
        with monitor.micro_batch():
            loss = loss_fn(model, batch)
            loss.backward()
        monitor.step(engine, loss)
    found = record(monitor)
    said = {event["what"]: event["says"] for event in events(found, "unavailable")}
    assert len(events(found, "unavailable")) == len(said)  # once, and not at every step
    assert said["eps_up"] == "no norm was found"
    assert "Monitor(logits=...)" in said["logz_mean"]
    assert "keeps the state of its optimizer to itself" in said["adam_eps_share"]
    assert not {"eps_up", "adam_eps_share"} & set(found.profiles)
    assert "logz_mean" not in found.series
    assert "attn_logit_max, attn_entropy" in found.start["not_measured"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RAdam])
def test_with_another_optimizer_there_is_no_adam_and_that_is_said_once(kind: Any, tmp_path: Path) -> None:
    model = net(2)
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    train(model, monitor, batches(2), optimizer=kind(model.parameters(), 0.1))
    found = record(monitor)
    assert "adam_eps_share" not in found.profiles
    (said,) = [event["says"] for event in events(found, "unavailable") if event["what"] == "adam_eps_share"]
    assert said == f"the optimizer is {kind.__name__}, and not torch's Adam or AdamW"
    assert not events(found, "probe_off")


def test_a_micro_batch_that_did_not_end_well_is_not_measured(tmp_path: Path) -> None:
    profiles = []
    for fails in (False, True):
        model = net(2)
        for block in model.blocks:
            block.drop.p = 0.0
        monitor = normscale.Monitor(model, runs=tmp_path, logits="head")
        if fails:
            with suppress(RuntimeError), monitor.micro_batch():
                model(5 * batches(1)[0]).view(-1, 3)  # which its size does not allow
        train(model, monitor, batches(1))
        found = record(monitor)
        profiles.append({name: profile.data for name, profile in found.profiles.items()})
        profiles[-1]["logz"] = np.array(found.series["logz_mean"].values)
    for name, data in profiles[0].items():
        np.testing.assert_array_equal(profiles[1][name], data, err_msg=name)


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_measured_step_has_two_collectives_more(
    depth: int, clip: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of ranks that hold parts of the gradients; here two that hold the same, whose collectives need no other rank."""
    calls: list[int] = []

    def reduced(values: Tensor, how: Any) -> Tensor:
        calls.append(values.numel())
        return 2 * values if how is torch.distributed.ReduceOp.SUM else values.clone()

    monkeypatch.setattr("normscale.monitor.engines._reduced", reduced)
    model = net(depth)
    monitor = normscale.Monitor(model, runs=tmp_path, every=2, clip=clip, logits="head")
    monitor.engine.world = monitor.guard.world = 2
    optimizer, counts = adamw(model), []
    for batch in batches(4):
        calls.clear()
        with monitor.micro_batch():
            loss = loss_fn(model, batch)
            loss.backward()
        own = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        report = monitor.step(optimizer, loss)
        optimizer.zero_grad()
        counts.append(len(calls))
        if report.grad_norm is not None:
            assert report.grad_norm == pytest.approx(float(own) * math.sqrt(2), rel=1e-5)
    assert counts == [4, 3, 1, 3]  # the first time the shapes of what is handed over are agreed upon
    assert not events(record(monitor), "probe_off")
