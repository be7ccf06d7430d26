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
from normscale.data.batches import Batches, check_divides, held_out_batches, too_few, unigram_of
from normscale.data.task import IGNORE, MicroBatch, Task, load_task
from normscale.errors import NonFiniteStop, NormscaleError, RunFailed, StoreError
from normscale.models.attention import attention_backend
from normscale.models.builder import build
from normscale.models.init import weights
from normscale.models.projection import Projection
from normscale.models.stack import Transformer
from normscale.norms import Norm
from normscale.ops.products import Rounded
from normscale.probes.activations import Activations
from normscale.probes.gradients import Gradients, depth_slope
from normscale.probes.layers import Layers
from normscale.probes.probe import Array, Probe, Subject
from normscale.probes.update import ModelUpdate
from normscale.schemes import Role
from normscale.tracking.files import write_whole
from normscale.tracking.record import Outcome
from normscale.tracking.spool import SPOOL, SpoolWriter, next_attempt, read_run
from normscale.train.checkpoint import Checkpoints, Found, random_state, set_random_state
from normscale.train.denormals import denormals, flushed
from normscale.train.engine import DTYPES, Engine, check_precision, device_kind, make_engine, world_size
from normscale.train.identity import environment, identity, run_id_of
from normscale.train.loop import Recorder, Trainer, summed_loss
from normscale.train.meter import Meter

OnStep = Callable[[int, int, float], None]

LAYER_BATCHES = 2  # held-out batches that blocks are left out on: what a block is worth is a difference on one text
OnResume = Callable[[int, Path], None]


@dataclass(frozen=True)
class RunResult:
    """How a run ended; `exit_code` is 0 well, 3 not finite.

    A run ends as not finite, too, if none of its steps was applied, as where fp16's loss scale never came down far
    enough: its weights are those it began with, so its losses say nothing, however finite.
    """

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
    on_resume: OnResume | None = None,
    on_step: OnStep | None = None,
) -> RunResult:
    """Trains one model to its end and returns how it went; a run that is finished already is only read.

    A run that was interrupted goes on from its newest checkpoint that can be used, and gives what it would have given
    without the interruption; `fresh` trains it from the beginning whatever there is of it.

    Every rank calls it; rank 0 writes the records. `on_start` is called once the input has proved good and records are
    being written, then `on_resume` with (step, folder of the checkpoint) if it goes on, and `on_step` with (step,
    steps, loss) after each step.

    Raises:
        BadInput: the configuration, the data or the store cannot be used; nothing was written.
        RunFailed: it cannot go on, or its end could not be recorded.
    """
    with denormals(config.precision.flush_denormals):  # before the first computation of all
        return _run(config, fresh, on_start, on_resume, on_step)


def _run(
    config: RunConfig,
    fresh: bool,
    on_start: Callable[[], None] | None,
    on_resume: OnResume | None,
    on_step: OnStep | None,
) -> RunResult:
    task = load_task(config)
    run_id = run_id_of(config)
    run_dir = Path(config.tracking.runs).absolute() / run_id
    if not fresh and (run_dir / SPOOL).exists():
        record = read_run(run_dir)
        if record.end is not None and record.finished:
            code = int(record.end["exit_code"])
            return RunResult(run_id, run_dir, record.end["outcome"], code, record.summary, skipped_existing=True)

    # All that can be wrong with the input shows before the first byte is written.
    check_precision(config.precision, device_kind(), world_size())
    check_divides(config.train.batch, world_size(), config.train.accumulate)
    if len(task.held_out) < config.train.batch:
        raise too_few(len(task.held_out), config.train.batch, split="held-out ")
    model = build(config.model, task.vocab, config.seed)
    first = Batches(task.train, batch=config.train.batch, seed=config.seed).window(0)
    with torch.no_grad():
        model.scheme.calibrate(lambda: model(first[0].tokens_BT, **first[0].beside))
    engine = make_engine(model, config.precision)
    torch.manual_seed(config.seed * 65_537 + engine.rank)  # dropout differs by rank; nothing else draws from it
    session = _Session(config, task, engine)
    checkpoints = Checkpoints(run_dir, identity(config)["hash"], engine, config.checkpoint.keep)
    recorder = _open(config, run_dir) if engine.rank == 0 else _Silent()
    outcome: Outcome = "error"
    summary: dict[str, Any] = {}
    code = 1
    try:
        found, passed_over = _found(checkpoints, session, recorder, fresh)
        step = found.step if found else 0
        if found is not None:
            session.load_state_dict(found.state)
        recorder.start(**session.facts(run_id, step))
        for path, reason in passed_over:
            recorder.event(step, "checkpoint_passed_over", path=str(path), reason=reason)
        if on_start is not None:
            on_start()
        if found is not None and on_resume is not None:
            on_resume(step, found.path)
        found = None  # a second copy of the weights
        outcome = session.train(recorder, checkpoints, on_step)
        checkpoints.clean()
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

    def __init__(self, config: RunConfig, task: Task, engine: Engine) -> None:
        self.config, self.task, self.engine = config, task, engine
        train = config.train
        self.batches = Batches(
            task.train,
            batch=train.batch,
            seed=config.seed,
            accumulate=train.accumulate,
            rank=engine.rank,
            world=engine.world,
        )
        self.held_out = held_out_batches(task, train.batch, train.eval_batches)
        self.unigram_nats = unigram_of(task, self.held_out)
        self.probes = _probes(config, task)
        subject = subject_of(engine)
        for probe in self.probes:
            probe.attach(subject)
        self.trainer = Trainer(engine, config, self.probes)
        self.meter = Meter(config, task.vocab, engine.device, engine.world)
        self.seconds = 0.0
        self.checkpoint_s = 0.0
        self.loss_val = self.loss_train = math.nan
        self._warned = False
        self._graphs_before = _compiled_graphs()

    def facts(self, run_id: str, from_step: int) -> dict[str, Any]:
        """Returns the fields of the start record."""
        model, engine = self.engine.inner, self.engine
        return {
            "run_id": run_id,
            "from_step": from_step,
            "config": self.config.model_dump(mode="json"),
            "identity": identity(self.config),
            "environment": {**environment(), "threads": torch.get_num_threads()},
            "data": {**self.task.facts(), **self.batches.facts(), "unigram_nats": self.unigram_nats},
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
            "precision_seen": precision_seen(engine, self.held_out[0]),
            "rows": [site.name for site in model.sites()],
            "outer_run": os.environ.get("MLFLOW_RUN_ID"),
        }

    def _attention(self) -> str:
        model, products = self.config.model, self.engine.products
        if isinstance(products, Rounded):
            return "rounded"
        if products.softmax == "compute":
            return "unfused"
        dtype = DTYPES[self.config.precision.compute]
        shape = (model.heads, model.context, model.d // model.heads)
        return attention_backend(shape, model.dropout, dtype, self.engine.device, causal=model.M > 0)

    def train(self, recorder: "SpoolWriter | _Silent", checkpoints: Checkpoints, on_step: OnStep | None) -> Outcome:
        """Runs the steps to come, with the evaluations and checkpoints that are asked for, and returns the outcome."""
        train, every = self.config.train, self.config.checkpoint.every
        started, before = time.perf_counter() - self.seconds, self.trainer.attempted
        if before == 0:
            self.evaluate(0, recorder)
        for step in range(before + 1, train.steps + 1):
            begun = time.perf_counter()
            window = self.batches.window(step - 1)
            result = self.trainer.step(window, recorder)
            self.meter.add(time.perf_counter() - begun, window, result.targets)
            self.loss_train, self.seconds = result.loss, time.perf_counter() - started
            if on_step is not None:
                on_step(step, train.steps, result.loss)
            stop = not result.applied and not result.overflow and train.on_nonfinite == "stop"
            if stop or step == train.steps or (train.eval_every and step % train.eval_every == 0):
                self.evaluate(step, recorder)
                stop = stop or (train.on_nonfinite == "stop" and not math.isfinite(self.loss_val))
            if stop:
                return "nan"
            if every and (step % every == 0 or step == train.steps):
                started += self.save(step, recorder, checkpoints)
        return "finished" if math.isfinite(self.loss_val) and self.trainer.applied else "nan"

    def evaluate(self, step: int, recorder: Recorder) -> None:
        """Records the held-out loss and its distance to the unigram entropy of the same batches."""
        self.loss_val = self.trainer.evaluate(self.held_out)
        values = {"loss_val": self.loss_val, "loss_gap": self.unigram_nats - self.loss_val}
        recorder.metrics(step, self.trainer.applied, values)

    def save(self, step: int, recorder: "SpoolWriter | _Silent", checkpoints: Checkpoints) -> float:
        """Writes a checkpoint; returns the seconds it took. If it cannot be written, training goes on without it."""
        begun = time.perf_counter()
        recorder.sync()  # a checkpoint must not be ahead of the records
        if failed := checkpoints.save(step, recorder.attempt, recorder.last, self.state_dict()):
            recorder.event(step, "checkpoint_failed", reason=failed)
            if self.engine.rank == 0 and not self._warned:
                message = f"normscale: {checkpoints.path(step)}: the checkpoint could not be written ({failed})"
                print(f"{message}; training goes on, the checkpoints before it are kept", file=sys.stderr, flush=True)
            self._warned = True
        spent = time.perf_counter() - begun
        self.checkpoint_s += spent
        self.trainer.paused(spent)
        return spent

    def state_dict(self) -> dict[str, Any]:
        """Returns what a run goes on from; where the data stand follows from the step."""
        numbers = {name: getattr(self, name) for name in ("loss_val", "loss_train", "seconds", "checkpoint_s")}
        return {"session": numbers, "trainer": self.trainer.state_dict(), "own": random_state(self.engine.device)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        for name, number in state["session"].items():
            setattr(self, name, number)
        self.trainer.load_state_dict(state["trainer"])
        set_random_state(state["own"], self.engine.device)

    def summary(self) -> dict[str, Any]:
        """Returns the fields of the end record's summary."""
        trainer = self.trainer
        bad_step, bad_layer, bad_parameter = trainer.first_bad or (-1, -1, None)
        if bad_step < 0 and not trainer.applied:  # each was put down to the loss scale
            bad_step = 1
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
            "checkpoint_s": self.checkpoint_s,
            **self.meter.summary(),
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

    lost = attempt = last = 0
    gone: str | None = None

    def sync(self) -> None: ...

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
    last_out = [weight.name for weight in weights(model) if weight.role == Role("ffn", "out")][-1:]

    def features(inputs: Mapping[str, Tensor]) -> Tensor:
        with engine.aside() as quiet:
            return quiet.features(**inputs)

    def streams_between(inputs: Mapping[str, Tensor]) -> list[list[Tensor]]:
        seen: list[Tensor] = []
        with engine.aside() as quiet:
            quiet.features(**inputs, outputs=seen)
        encoder = seen[: model.depth.N + 1] if model.depth.N else []
        return [side for side in (encoder, seen[len(encoder) :]) if side]

    def loss(inputs: Mapping[str, Tensor], targets: Tensor, skip: int | None) -> Tensor:
        with engine.aside() as quiet:
            total = summed_loss(quiet(**inputs, skip=skip), targets)
        return total / (targets != IGNORE).sum()

    return Subject(
        sites=[site.name for site in model.sites()],
        streams=model.stream_count,
        width=model.d,
        device=engine.device,
        features=features,
        gradient_squares=lambda: engine.flat.squares(groups),
        last_out_square=lambda: engine.flat.squares([last_out]),
        streams_between=streams_between,
        loss=loss,
    )


def precision_seen(engine: Engine, batch: MicroBatch) -> dict[str, str]:
    """Returns the dtypes that one forward pass really used, not the ones that were asked for.

    Where products are rounded (`simulated`), `compute` is the format, if the first product's result is in it.
    """
    seen: dict[str, str] = {}
    products = engine.products

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            dtype = str(tensor.dtype).removeprefix("torch.")
            if name == "compute" and isinstance(products, Rounded) and products.holds(tensor):
                dtype = products.format.dtype
            seen.setdefault(name, dtype)

        return hook

    sublayer = engine.inner.sublayers()[0]
    product = next(m for m in sublayer.modules() if isinstance(m, Projection))
    hooks = [product.register_forward_hook(note("compute")), sublayer.register_forward_hook(note("stream"))]
    try:
        with _eager(engine.inner), engine.aside() as model:
            model.features(**batch.to(engine.device).inputs)
    finally:
        for hook in hooks:
            hook.remove()
    seen["params"] = str(engine.flat.values.dtype).removeprefix("torch.")
    seen["grads"] = str(engine.flat.grads.dtype).removeprefix("torch.")
    seen["reduce"] = engine.reduced_in()
    seen["softmax"] = "float32"
    if products.softmax == "compute":
        seen["softmax"] = products.in_attention.dtype if isinstance(products, Rounded) else seen["compute"]
    seen["tf32"] = str(engine.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32).lower()
    seen["simulated"] = str(isinstance(products, Rounded)).lower()
    seen["flush_denormals"] = str(flushed() == "all").lower()
    return seen


def _eager(model: Transformer) -> AbstractContextManager[Any]:
    """Returns a context in which a compiled model runs eagerly, so that hooks inside its blocks fire."""
    compiled = any("forward" in vars(block) for block in model.blocks)
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _probes(config: RunConfig, task: Task) -> list[Probe]:
    probes: list[Probe] = []
    if config.probes.profiles:
        probes += [Activations(), Gradients()]
    if config.probes.update.steps:
        n = config.probes.update.sequences
        fixed = held_out_batches(task, n, 1, key="probes.update.sequences")[0]
        probes.append(ModelUpdate(fixed.inputs, config.probes.update.steps))
    if config.probes.layers:
        batches = held_out_batches(task, config.train.batch, LAYER_BATCHES, key="probes.layers")
        probes.append(Layers([(batch.inputs, batch.targets_BT) for batch in batches], config.train.steps))
    return probes


def _found(
    checkpoints: Checkpoints, session: _Session, recorder: "SpoolWriter | _Silent", fresh: bool
) -> tuple[Found | None, list[tuple[Path, str]]]:
    """Returns the checkpoint to go on from, if there is one, and those that were passed over, with the reasons."""
    passed_over: list[tuple[Path, str]] = []

    def tell(path: Path, reason: str) -> None:
        passed_over.append((path, reason))
        print(f"normscale: {path}: passed over: {reason}", file=sys.stderr, flush=True)

    if fresh:
        checkpoints.pass_over()
        return None, passed_over
    reached = read_run(recorder.run_dir).reached if isinstance(recorder, SpoolWriter) else {}
    late = {f"trainer/{name}": tensor for name, tensor in session.trainer.late_state().items()}
    found = checkpoints.newest(reached, session.state_dict(), late, tell)
    if passed_over and found is None:
        line = f"normscale: {checkpoints.root}: no checkpoint can be used; training starts at step 0"
        print(line, file=sys.stderr, flush=True)
    return found, passed_over


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
