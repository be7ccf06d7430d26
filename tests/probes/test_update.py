"""The model update at its own interval."""

import torch

from normscale.config.schema import RunConfig
from normscale.probes.update import ModelUpdate
from normscale.train.engines.plain import PlainEngine
from normscale.train.observe import subject_of
from tests.probes.test_probes import MODEL, trained

TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(2))


def test_it_is_measured_at_its_steps_its_interval_and_the_last_step() -> None:
    _, notes = trained([ModelUpdate({"tokens_BT": TOKENS}, (1, 4), every=3, last=7)], steps=7)
    assert [step for step, values in notes.values.items() if "update" in values] == [1, 3, 4, 6, 7]
    _, notes = trained([ModelUpdate({"tokens_BT": TOKENS}, (2,))], steps=4)
    assert [step for step, values in notes.values.items() if "update" in values] == [2]


def test_it_asks_for_no_other_steps_to_be_measured() -> None:
    probe = ModelUpdate({"tokens_BT": TOKENS}, (), every=3, last=7)
    assert [step for step in range(1, 8) if probe.due(step)] == [3, 6, 7]


def test_what_is_kept_of_the_first_weights_is_their_output() -> None:
    probe = ModelUpdate({"tokens_BT": TOKENS}, (), every=2, last=4)
    trainer, _ = trained([probe], steps=4)
    state = probe.state_dict()
    assert list(state) == ["origin"]
    assert state["origin"].shape == (2, 8, 16)
    assert trainer.guard.seconds()["update"] == probe.stopwatch.seconds > 0
    assert list(trainer.updates) == [4]  # of those at the interval the last alone is for the summary


def test_a_restart_in_mid_interval_measures_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from normscale.models.builder import build

    probe = ModelUpdate({"tokens_BT": TOKENS}, (), every=2, last=4)
    whole, notes = trained([probe], steps=4)
    config = RunConfig(model=MODEL)
    again = ModelUpdate({"tokens_BT": TOKENS}, (), every=2, last=4)
    again.attach(subject_of(PlainEngine(build(config.model, 32, 1), config.precision, torch.device("cpu"))))
    again.load_state_dict(probe.state_dict())
    again.features = subject_of(whole.engine).features
    again.after_step(4)
    assert again.norm is not None
    assert float(again.norm) == notes.values[4]["update"]
