import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from normscale.claims.schemes import at_init
from normscale.claims.workers import Job
from normscale.config.schema import RunConfig
from normscale.errors import ConfigError, StoreError
from normscale.train.identity import identity
from normscale.train.run import run

DEPTHS = (2, 4)


def here(configs: Mapping[str, RunConfig]) -> Mapping[str, str]:
    """Makes the runs in this process; as `Take`."""
    for config in configs.values():
        run(config)
    return {}


def never(configs: Mapping[str, RunConfig]) -> Mapping[str, str]:
    raise AssertionError(f"measured again: {[config.name for config in configs.values()]}")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[at_init.Measured]]:
    runs = tmp_path_factory.mktemp("runs")
    return runs, at_init.measure(["post", "pre"], runs, DEPTHS, here)


def test_signal_gradient_and_update_are_those_of_theory(measured: tuple[Path, list[at_init.Measured]]) -> None:
    post, pre = measured[1]
    assert [at.blocks for at in post.at] == list(DEPTHS)
    assert not post.failed
    for shallow, deep in (post.at, pre.at):
        assert len(deep.stream_rms) == len(deep.gradient) == 2 * len(shallow.stream_rms) == 8
        assert deep.parameters > shallow.parameters
    np.testing.assert_allclose(post.at[1].stream_rms, 1, rtol=1e-3)  # normed after every sum
    assert pre.at[1].stream_rms[-1] > 1.5 > pre.at[1].stream_rms[0]  # each branch adds its variance
    assert pre.at[1].gradient[0] > pre.at[1].gradient[-1]
    for optimizer in at_init.OPTIMIZERS:
        update = {one.scheme: one.at[1].update[optimizer] for one in measured[1]}
        assert update["post"] > update["pre"] > 10  # over the learning rate, which is a tiny one
        slope = post.update_slope(optimizer)
        assert slope is not None
        assert slope.slope.value == pytest.approx(np.log2(update["post"] / post.at[0].update[optimizer]))


def test_it_is_measured_on_the_cpu_whatever_gpus_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def look(configs: Mapping[str, RunConfig]) -> Mapping[str, str]:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""  # in which workers start
        assert {identity(config)["device"] for config in configs.values()} == {"cpu"}
        return dict.fromkeys(configs, "left out")

    (found,) = at_init.measure(["pre"], tmp_path, (2,), look)
    assert len(found.lost) == 2


def test_what_was_measured_is_not_measured_again(measured: tuple[Path, list[at_init.Measured]]) -> None:
    runs, before = measured
    again = at_init.measure(["pre"], runs, DEPTHS, never)
    np.testing.assert_array_equal(again[0].at[1].gradient, before[1].at[1].gradient)
    assert len([path for path in runs.iterdir() if path.is_dir()]) == 8  # schemes, depths, optimizers


def test_what_an_interruption_left_is_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        """A pool whose first job is done when Ctrl-C comes, and whose second is being measured."""

        def __init__(self, _workers: int) -> None: ...

        def __enter__(self) -> "Interrupted":
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, jobs: Sequence[Job], tell: Callable[[Job | None], None]) -> None:
            done, begun = jobs
            assert isinstance(done.config, RunConfig)
            assert isinstance(begun.config, RunConfig)
            run(done.config)
            done.outcome = "done"
            tell(done)
            run(begun.config, on_step=interrupt)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(at_init, "Pool", Interrupted)
    monkeypatch.setattr(at_init, "cores", lambda: 1)
    with pytest.raises(KeyboardInterrupt, match=r"^1 of 2 are measured and kept; the same command goes on with the"):
        at_init.measure(["pre"], tmp_path, (2,))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("2 runs of one step to do, about 0:1")
    assert first.endswith("; Ctrl-C keeps what is measured, and the same command goes on")
    assert second == "measured at initialisation: 1 of 2 (pre, 2 blocks, SGD)"
    asked: list[str] = []

    def rest(configs: Mapping[str, RunConfig]) -> Mapping[str, str]:
        asked.extend(config.name for config in configs.values())
        return here(configs)

    (found,) = at_init.measure(["pre"], tmp_path, (2,), rest)
    assert asked == ["pre, 2 blocks, Adam"]
    assert set(found.at[0].update) == set(at_init.OPTIMIZERS)


def test_a_scheme_that_cannot_be_measured_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(configs: Mapping[str, RunConfig]) -> Mapping[str, str]:
        return {run: "its worker died" for run, config in configs.items() if config.train.optim.name == "sgd"}

    (found,) = at_init.measure(["pre"], tmp_path, (2,), dies)
    assert found.at == ()
    assert found.failed == found.lost == ("pre, 2 blocks, SGD: its worker died",)
    assert found.update_slope("sgd") is None

    def refuse(*_: object) -> RunConfig:
        raise ConfigError("model.M: too few blocks", key="model.M")

    monkeypatch.setattr(at_init, "config_of", refuse)
    (found,) = at_init.measure(["pre"], tmp_path, (2,), never)
    assert (found.failed, found.lost) == (("2 blocks: model.M: too few blocks",), ())


@pytest.mark.parametrize("gone", ['"stream_rms"', '"kind":"start"'])
def test_a_damaged_record_is_named_with_its_mend(tmp_path: Path, gone: str) -> None:
    at_init.measure(["pre"], tmp_path, (2,), here)
    for spool in tmp_path.glob("*/spool.jsonl"):
        lines = spool.read_text().splitlines(keepends=True)
        spool.write_text("".join(line for line in lines if gone not in line))
    with pytest.raises(StoreError, match=r"pre-L0002-s0-\w+: its record is damaged .*; remove the folder"):
        at_init.measure(["pre"], tmp_path, (2,), never)


def test_a_scheme_is_measured_as_a_decoder_where_it_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = at_init.config_of("pre", 6, "sgd", tmp_path)
    assert (config.model.N, config.model.M) == (0, 6)
    for has, blocks in (({"encoder"}, [6, 0]), ({"encoder-decoder"}, [3, 3]), ({"encoder", "decoder"}, [0, 6])):
        monkeypatch.setattr(at_init.find_scheme("pre"), "topologies", frozenset(has))
        model = at_init.config_of("pre", 6, "sgd", tmp_path).model
        encoder, decoder = model.N, model.M
        assert [encoder, decoder] == blocks
