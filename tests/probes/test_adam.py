"""Adam's epsilon, against plain PyTorch's AdamW over the parameters one by one."""

import numpy as np
import pytest
import torch
from torch import nn

from normscale.probes.adam import PIECE, AdamEpsilon
from normscale.train.flat import FlatParameters
from tests.probes.test_probes import MODEL, trained, windows


def twin(groups: list[list[nn.Parameter]], optimizer: torch.optim.Optimizer, eps: float) -> tuple[list[float], ...]:
    """Share of entries below eps, and share of the steps that eps takes, of each group of parameters."""
    shares, taken = [], []
    for group in groups:
        roots, steps = [], []
        for p in group:
            state = optimizer.state[p]
            t = int(state["step"])
            roots.append((state["exp_avg_sq"].double() / (1 - 0.98**t)).sqrt().flatten())
            steps.append((state["exp_avg"].double() / (1 - 0.9**t)).abs().flatten())
        root, step = torch.cat(roots), torch.cat(steps)
        shares.append(float((root < eps).double().mean()))
        moved = root > 0
        taken.append(1 - float((step / (root + eps))[moved].sum() / (step / root.clamp(min=1e-300))[moved].sum()))
    return shares, taken


@pytest.mark.parametrize("eps", [1e-8, 3e-3])
@pytest.mark.parametrize("model", [{"scheme": "pre"}, {"scheme": "deepnorm", "d": 12, "heads": 3}])
def test_it_is_that_of_plain_adam(eps: float, model: dict[str, object]) -> None:
    own = AdamEpsilon(every=2, last=3)
    optim = {"lr": 1e-3, "eps": eps, "betas": [0.9, 0.98]}
    _, notes = trained([own], steps=3, model=model, optim=optim)
    assert {step for step, name in notes.profiles if name == "adam_eps_share"} == {2, 3}

    from normscale.config.schema import ModelConfig
    from normscale.models.builder import build
    from normscale.train.loop import summed_loss

    plain = build(ModelConfig(**MODEL | model), 32, 0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=eps, weight_decay=0.0)
    for (batch,) in windows(3):
        optimizer.zero_grad()
        (summed_loss(plain(batch.tokens_BT), batch.targets_BT) / batch.n_targets).backward()
        optimizer.step()
    groups = [list(sublayer.parameters()) for sublayer in plain.sublayers()]
    shares, taken = twin(groups, optimizer, eps)
    sizes = [sum(p.numel() for p in group) for group in groups]
    np.testing.assert_allclose(notes.profiles[3, "adam_eps_share"], shares, atol=2 / min(sizes))
    np.testing.assert_allclose(notes.profiles[3, "adam_eps_taken"], taken, rtol=1e-2, atol=1e-6)
    assert notes.values[3]["adam_eps_share"] == pytest.approx(np.average(shares, weights=sizes), abs=2 / sum(sizes))
    assert (eps < 1e-3) or 0.02 < min(shares) < max(shares) < 1


def test_it_changes_no_bit_of_the_training() -> None:
    plain, _ = trained([], steps=3)
    probed, _ = trained([AdamEpsilon(every=1, last=3)], steps=3)
    assert torch.equal(plain.engine.flat.values, probed.engine.flat.values)
    moments = [
        {name: t.clone() for leaf in trainer.engine.leaves() for name, t in trainer.optimizer.state[leaf].items()}
        for trainer in (plain, probed)
    ]
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])


def test_before_a_step_was_applied_and_with_sgd_there_is_nothing_to_say() -> None:
    _, notes = trained([AdamEpsilon(every=1, last=3)], steps=3, optim={"name": "sgd", "lr": 0.1})
    assert "adam_eps_share" not in notes.values[3]
    assert not notes.events  # it is not switched off either


def test_padding_is_no_entry_and_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"steps": 3, "model": {"d": 12, "heads": 3, "ffn": 20}, "optim": {"eps": 3e-3}}
    trainer, whole = trained([AdamEpsilon(every=3, last=3)], **settings)  # type: ignore[arg-type]
    assert FlatParameters(nn.Linear(3, 3)).values.numel() == 32  # 9 and 3 entries: there is padding
    assert trainer.engine.flat.values.numel() > sum(p.numel() for p in trainer.engine.inner.parameters())
    assert trainer.engine.flat.values.numel() < PIECE
    monkeypatch.setattr("normscale.probes.adam.PIECE", 1)
    _, parts = trained([AdamEpsilon(every=3, last=3)], **settings)  # type: ignore[arg-type]
    for name in ("adam_eps_share", "adam_eps_taken"):
        np.testing.assert_allclose(parts.profiles[3, name], whole.profiles[3, name], rtol=1e-6)
