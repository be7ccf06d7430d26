"""The life of a run: build, record the start, train, evaluate, record the end."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normscale.arguments import exit_code_of
from normscale.config.load import dump
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches, check_divides, held_out_batches, unigram_of
from normscale.data.corpus import Corpus, packed, require
from normscale.errors import NonFiniteStop, NormscaleError, RunFailed, StoreError
from normscale.models.attention import attention_backend
from normscale.models.builder import build
from normscale.models.projection import Projection
from normscale.models.stack import Decoder
from normscale.norms import Norm
from normscale.probes.activations import Activations
from normscale.probes.gradients import Gradients, depth_slope
from normscale.probes.probe import Array, Probe, Subject
from normscale.probes.update import ModelUpdate
from normscale.tracking.files import write_whole
from normscale.tracking.record import Outcome
from normscale.tracking.spool import SPOOL, SpoolWriter, next_attempt, read_run
from normscale.train.engine import Engine, make_engine, world_size
from normscale.train.identity import corpus_of, environment, identity, run_id_of
from normscale.train.loop import Recorder, Trainer

OnStep = Callable[[int, int, float], None]


@dataclass(frozen=True)
class RunResult:
    """How a run ended; `exit_code` is 0 well, 3 stopped on non-finite values."""

    run_id: str
    run_dir: Path
    outcome: Outcome
    exit_code: int
    summary: dict[str, Any]
    skipped_existing: bool = False


def run(
    config: RunConfig,
    *,
    fresh: bool = False,
    on_start: Callable[[], None] | None = None,
    on_step: OnStep | None = None,
) -> RunResult:
    """Trains one model to its end and returns how it went; a run that is finished already is only read.

    Every rank calls it; rank 0 writes the records. `on_start` is called once the input has proved good and records are
    being written, `on_step` with (step, steps, loss) after each step.

    Raises:
        BadInput: the configuration, the data or the store cannot be used; nothing was written.
        RunFailed: it cannot go on, or its end could not be recorded.
    """
    corpus = corpus_of(config.data)
    run_id = run_id_of(config)
    run_dir = Path(config.tracking.runs).absolute() / run_id
    if not fresh and (run_dir / SPOOL).exists():
        record = read_run(run_dir)
        if record.end is not None and record.finished:
            code = int(record.end["exit_code"])
            return RunResult(run_id, run_dir, record.end["outcome"], code, record.summary, skipped_existing=True)

    # All that can be wrong with the input shows before the first byte is written.
    require(corpus, config.model.context, config.train.batch)
    check_divides(config.train.batch, world_size(), config.train.accumulate)
    model = build(config.model, corpus.vocab, config.seed)
    first = Batches(packed(corpus, "train", config.model.context), batch=config.train.batch, seed=config.seed).window(0)
    with torch.no_grad():
        model.scheme.calibrate(lambda: model(first[0].tokens_BT))
    engine = make_engine(model, config.precision)
    torch.manual_seed(config.seed * 65_537 + engine.rank)  # dropout differs by rank; nothing else draws from it
    session = _Session(config, corpus, engine)
    recorder = _open(config, run_dir) if engine.rank == 0 else _Silent()
    outcome: Outcome = "error"
    summary: dict[str, Any] = {}
    code = 1
    try:
        recorder.start(**session.facts(run_id))
        if on_start is not None:
            on_start()
        outcome = session.train(recorder, on_step)
        code = NonFiniteStop.exit_code if outcome == "nan" else 0
        summary = session.summary()
    except KeyboardInterrupt as error:
        outcome, code = "interrupted", exit_code_of(error)[0]
        raise
    except NormscaleError as error:
        code = error.exit_code
        raise
    except Exception as error:
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise RunFailed(_compiler_failed(error)) from error
        raise
    finally:
        recorder.end(outcome, code, summary)
        recorder.close()
        code = 1 if recorder.gone and outcome in ("finished", "nan") else code
        _leave_status(run_dir, outcome, code)
        if outcome in ("finished", "nan"):
            engine.close()
    if recorder.gone:
        raise RunFailed(
            f"{run_dir}: the records of this run are gone or incomplete, its end could not be written "
            f"({recorder.gone}); train it again"
        )
    return RunResult(run_id, run_dir, outcome, code, summary)


class _Session:
    """What lives from the start of a run to its end."""

    def __init__(self, config: RunConfig, corpus: Corpus, engine: Engine) -> None:
        self.config, self.corpus, self.engine = config, corpus, engine
        train, context = config.train, config.model.context
        self.batches = Batches(
            packed(corpus, "train", context),
            batch=train.batch,
            seed=config.seed,
            accumulate=train.accumulate,
            rank=engine.rank,
            world=engine.world,
        )
        self.held_out = held_out_batches(corpus, context, train.batch, train.eval_batches)
        self.unigram_nats = unigram_of(corpus, self.held_out)
        self.probes = _probes(config, corpus)
        subject = subject_of(engine)
        for probe in self.probes:
            probe.attach(subject)
        self.trainer = Trainer(engine, config, self.probes)
        self.targets = 0
        self.seconds = 0.0
        self.loss_val = self.loss_train = math.nan
        self._graphs_before = _compiled_graphs()

    def facts(self, run_id: str) -> dict[str, Any]:
        """Returns the fields of the start record."""
        model, engine = self.engine.inner, self.engine
        return {
            "run_id": run_id,
            "from_step": 0,
            "config": self.config.model_dump(mode="json"),
            "identity": identity(self.config),
            "environment": {**environment(), "threads": torch.get_num_threads()},
            "data": {**self.corpus.facts(), **self.batches.facts(), "unigram_nats": self.unigram_nats},
            "model": {
                "params": sum(p.numel() for p in model.parameters()),
                "sites": len(model.sites()),
                "structures": model.structures,
                "eps": sorted({m.eps for m in model.modules() if isinstance(m, Norm)}),
            },
            "engine": engine.name,
            "backend": {
                "norm": "eager",
                "attention": self._attention(),
            },
            "precision_seen": precision_seen(engine, self.held_out[0][0][:1]),
            "rows": [site.name for site in model.sites()],
            "outer_run": os.environ.get("MLFLOW_RUN_ID"),
        }

    def _attention(self) -> str:
        model = self.config.model
        dtype = torch.bfloat16 if self.config.precision.compute == "bf16" else torch.float32
        shape = (model.heads, model.context, model.d // model.heads)
        return attention_backend(shape, model.dropout, dtype, self.engine.device)

    def train(self, recorder: Recorder, on_step: OnStep | None) -> Outcome:
        """Runs all steps, with the evaluations the configuration asks for, and returns the outcome."""
        train, started = self.config.train, time.perf_counter()
        self.evaluate(0, recorder)
        for step in range(1, train.steps + 1):
            result = self.trainer.step(self.batches.window(step - 1), recorder)
            self.targets += self.batches.targets_per_step
            self.loss_train, self.seconds = result.loss, time.perf_counter() - started
            if on_step is not None:
                on_step(step, train.steps, result.loss)
            stop = not result.applied and train.on_nonfinite == "stop"
            if stop or step == train.steps or (train.eval_every and step % train.eval_every == 0):
                self.evaluate(step, recorder)
                stop = stop or (train.on_nonfinite == "stop" and not math.isfinite(self.loss_val))
            if stop:
                return "nan"
        return "finished" if math.isfinite(self.loss_val) else "nan"

    def evaluate(self, step: int, recorder: Recorder) -> None:
        """Records the held-out loss and its distance to the unigram entropy of the same batches."""
        self.loss_val = self.trainer.evaluate(self.held_out)
        values = {"loss_val": self.loss_val, "loss_gap": self.unigram_nats - self.loss_val}
        recorder.metrics(step, self.trainer.applied, values)

    def summary(self) -> dict[str, Any]:
        """Returns the fields of the end record's summary."""
        trainer = self.trainer
        bad_step, bad_layer, bad_parameter = trainer.first_bad or (-1, -1, None)
        gradient = trainer.last_profiles.get("grad_norm")
        return {
            "loss_val": self.loss_val,
            "loss_train": self.loss_train,
            "unigram_nats": self.unigram_nats,
            "gap": self.unigram_nats - self.loss_val,
            "grad_slope": math.nan if gradient is None else depth_slope(gradient),
            "grad_min_end": math.nan if gradient is None else float(gradient.min()),
            "bad_step": trainer.attempted if bad_step < 0 and not math.isfinite(self.loss_val) else bad_step,
            "bad_layer": bad_layer,
            "bad_parameter": bad_parameter or "",
            "spike": trainer.spikes.score,
            "skipped": trainer.attempted - trainer.applied,
            "steps": trainer.attempted,
            "applied": trainer.applied,
            "seconds": self.seconds,
            "tokens_s": self.targets / self.seconds,
            "graphs": _compiled_graphs() - self._graphs_before,
            **{f"update@{step}": value for step, value in trainer.updates.items()},
        }


def _compiler_failed(error: Exception) -> str:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"model.compile: the compiler failed ({reason[:200]}); it needs a C++ compiler and Python's headers; "
        "install them, or set model.compile=false"
    )


class _Silent:
    """The recorder of every rank but the first."""

    lost = 0
    gone: str | None = None

    def start(self, **fields: Any) -> None: ...

    def metrics(self, step: int, applied: int, values: Mapping[str, float]) -> None: ...

    def profile(self, step: int, name: str, data: Array) -> None: ...

    def event(self, step: int, event: str, **fields: Any) -> None: ...

    def end(self, outcome: Outcome, exit_code: int, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def subject_of(engine: Engine) -> Subject:
    """Returns what the probes may look at of a model on its engine."""
    model = engine.inner
    groups = model.site_parameters()

    def features(tokens: Tensor) -> Tensor:
        with engine.aside() as quiet:
            return quiet.features(tokens)

    return Subject(
        sites=[site.name for site in model.sites()],
        streams=model.stream_count,
        width=model.d,
        device=engine.device,
        features=features,
        gradient_squares=lambda: engine.flat.squares(groups),
    )


def precision_seen(engine: Engine, tokens: Tensor) -> dict[str, str]:
    """Returns the dtypes that one forward pass really used, not the ones that were asked for.

    Shape: tokens [B, T] int64.
    """
    seen: dict[str, str] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            seen.setdefault(name, str(tensor.dtype).removeprefix("torch."))

        return hook

    sublayer = engine.inner.sublayers()[0]
    product = next(m for m in sublayer.modules() if isinstance(m, Projection))
    hooks = [product.register_forward_hook(note("compute")), sublayer.register_forward_hook(note("stream"))]
    try:
        with _eager(engine.inner), engine.aside() as model:
            model.features(tokens.to(engine.device))
    finally:
        for hook in hooks:
            hook.remove()
    seen["params"] = str(engine.flat.values.dtype).removeprefix("torch.")
    seen["grads"] = str(engine.flat.grads.dtype).removeprefix("torch.")
    seen["tf32"] = str(engine.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32).lower()
    return seen


def _eager(model: Decoder) -> AbstractContextManager[Any]:
    """Returns a context in which a compiled model runs eagerly, so that hooks inside its blocks fire."""
    compiled = any("forward" in vars(block) for block in model.blocks)
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _probes(config: RunConfig, corpus: Corpus) -> list[Probe]:
    probes: list[Probe] = []
    if config.probes.profiles:
        probes += [Activations(), Gradients()]
    if config.probes.update.steps:
        n = config.probes.update.sequences
        tokens = held_out_batches(corpus, config.model.context, n, 1, key="probes.update.sequences")[0][0]
        probes.append(ModelUpdate(tokens, config.probes.update.steps))
    return probes


def _open(config: RunConfig, run_dir: Path) -> SpoolWriter:
    attempt = next_attempt(run_dir)
    writer = SpoolWriter(run_dir, attempt)
    try:
        write_whole(run_dir / "config.yaml", dump(config))
    except OSError as error:
        writer.close()
        raise StoreError(
            f"{run_dir}: cannot write config.yaml ({error.strerror}); choose another tracking.runs"
        ) from None
    return writer


def _leave_status(run_dir: Path, outcome: Outcome, code: int) -> None:
    """Leaves this rank's exit code beside the records, if their folder is there."""
    rank = os.environ.get("RANK", "0")
    with suppress(OSError):  # the exit code itself still tells
        write_whole(run_dir / f"rank{rank}.status", json.dumps({"exit_code": code, "outcome": outcome}))


def _compiled_graphs() -> int:
    if "torch._dynamo" not in sys.modules:  # it is slow to import, and eager runs never do
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
