"""What is said of a configuration before it runs, and of runs afterwards: check, plan, show, diff, and so on."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscale.commands.common import check_folder, load
from normscale.errors import BadInput
from normscale.progress import Doing

if TYPE_CHECKING:
    from normscale.config.schema import RunConfig


def check(options: argparse.Namespace) -> int:
    """Says what a configuration makes."""
    from normscale.config.deepspeed import filled

    loaded = filled(load(options.words, "normscale check"))
    from normscale.config.load import dump
    from normscale.models.plan import resolve
    from normscale.train.backend import norm_backend
    from normscale.train.engines.ranks import device_kind

    with loaded.sources.placed():
        plan = resolve(loaded.config.model)
        backend = norm_backend(plan, loaded.config.precision, device_kind())
    from normscale.models.skeleton import skeleton
    from normscale.tracking.show import amount
    from normscale.train.flops import flops_per_step, lengths_of

    config = loaded.config
    vocab = config.data.expected_vocab
    both = config.topology == "encoder-decoder"
    parameters = sum(skeleton(config.model, vocab).parameters().values())
    batch, lengths = config.train.batch, lengths_of(config.model)
    tokens = f"{batch * lengths.target:,} tokens" + (f" beside {batch * lengths.source:,} of the source" * both)
    flops = amount(flops_per_step(config.model, vocab, batch), "FLOP")
    sublayers = plan.depth.sublayers("encoder") + plan.depth.sublayers("decoder")
    print(f"# depth       N={plan.depth.N} M={plan.depth.M}, {sublayers} sublayers")
    print(f"# parameters  {parameters:,}")
    print(f"# norms       {backend}")
    print(f"# a step      {tokens}, {flops} forward and backward")
    print("\n".join(_estimates(config, device_kind())))
    if options.yaml:
        print(f"\n{dump(config).rstrip()}")
    return 0


def plan(options: argparse.Namespace) -> int:
    """Says what a run would take."""
    loaded = load(options.words, "normscale plan")
    from normscale.config.deepspeed import filled
    from normscale.plan.gpus import find_gpu
    from normscale.plan.make import Asked, made
    from normscale.plan.page import as_json, page

    gpu = find_gpu(options.gpu, options.memory)
    asked = Asked(options.gpus, options.per_host, gpu, options.vocab, options.mfu, options.hours_budget)
    with loaded.sources.placed():
        plan = made(filled(loaded).config, asked)
    print(json.dumps(as_json(plan)) if options.json else page(plan))
    return 1 if False in (plan.fits, plan.in_budget) else 0


def _estimates(config: "RunConfig", device: str) -> list[str]:
    """Returns the time of a step and the memory, as finished runs of this machine have them."""
    import torch

    from normscale.claims.cost import Device, from_finished, memory_of_nearest
    from normscale.progress import duration, figure
    from normscale.tracking.show import amount

    runs = Path(config.tracking.runs)
    kind: Device = "cuda" if device == "cuda" else "cpu"
    threads = torch.get_num_threads()
    cost = from_finished(runs, kind, threads)
    if cost is None:
        ran = f" with {threads} threads" if kind == "cpu" else ""
        return [f"# time        not known: no run of 50 steps has finished in {runs} on this machine{ran}"]
    lines = [
        f"# time        about {figure(cost.step(config))} s a step, {duration(cost.of(config))} for"
        f" {config.train.steps} steps (estimated by {cost.source})"
    ]
    if nearest := memory_of_nearest(runs, config, kind):
        lines.append(f"# memory      {amount(nearest[1], 'B')} at the most in {nearest[0]}, the nearest finished run")
    return lines


def show(options: argparse.Namespace) -> int:
    """Says what a run is and how it went, or lists the newest."""
    from normscale.tracking import draw, show
    from normscale.tracking.find import find_run
    from normscale.tracking.listing import as_json, listing
    from normscale.tracking.reader import is_written, read_run

    if options.run is None:
        check_folder(options.runs, "--runs", made=False)
        if options.json:
            print(json.dumps(as_json(options.runs)))
        else:
            print("\n".join(listing(options.runs, draw.look_of(sys.stdout, os.environ))))
        return 0
    folder = find_run(options.run, options.runs)
    record, alive = read_run(folder), is_written(folder)
    if options.json:
        print(json.dumps(show.as_json(record, alive), allow_nan=False))
    else:
        print("\n".join(show.show(record, alive, draw.look_of(sys.stdout, os.environ))))
    return 0


def diff(options: argparse.Namespace) -> int:
    """Says what sets two runs apart."""
    from normscale.tracking import diff, draw
    from normscale.tracking.find import find_run
    from normscale.tracking.reader import read_run

    a, b = (read_run(find_run(word, options.runs)) for word in (options.run, options.other))
    if options.json:
        print(json.dumps(diff.as_json(a, b), allow_nan=False))
    else:
        print("\n".join(diff.diff(a, b, draw.look_of(sys.stdout, os.environ))))
    return 0


def removal(options: argparse.Namespace) -> int:
    """Says what each block of a trained run is worth."""
    from normscale.tracking import draw
    from normscale.tracking.find import find_run
    from normscale.tracking.removal import table

    folder = find_run(options.run, options.runs)
    for name in ("blocks", "batches"):
        if getattr(options, name) < 1:
            raise BadInput(f"--{name}: {getattr(options, name)} leaves nothing to measure; give 1 or more")
    from normscale.train.removal import removal

    with Doing() as say:
        found, path = removal(folder, options.blocks, options.batches, options.checkpoint, say)
    said = found.as_json()
    return _tell(options, said, [*table(said, draw.look_of(sys.stdout, os.environ)), f"written to {path}"])


def translate(options: argparse.Namespace) -> int:
    """Translates held-out lines with a trained run, and says how good that is."""
    from normscale.tracking import draw
    from normscale.tracking.find import find_run
    from normscale.tracking.translation import table

    folder = find_run(options.run, options.runs)
    for name, least in (("sentences", 1), ("beam", 1), ("penalty", 0)):
        if getattr(options, name) < least:
            raise BadInput(f"--{name}: {getattr(options, name)} is too small; give {least} or more")
    from pydantic import ValidationError

    from normscale.config.probes import TranslationConfig
    from normscale.train.translate import translate

    try:
        how = TranslationConfig(sentences=options.sentences, beam=options.beam, penalty=options.penalty)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise BadInput(f"--{wrong['loc'][0]}: {wrong['input']}: {wrong['msg'].replace('Input', 'it')}") from None
    with Doing() as say:
        found, path = translate(folder, how, options.checkpoint, say)
    said = found.as_json()
    return _tell(options, said, [*table(said, draw.look_of(sys.stdout, os.environ)), f"all of them: {path}"])


def fold(options: argparse.Namespace) -> int:
    """Folds the norms of a trained run into its weights, and says what that changes."""
    from normscale.tracking import draw
    from normscale.tracking.find import find_run
    from normscale.tracking.fold import table

    folder = find_run(options.run, options.runs)
    if options.batches < 1:
        raise BadInput(f"--batches: {options.batches} leaves nothing to measure; give 1 or more")
    from normscale.fold.run import fold_run

    with Doing() as say:
        found, path = fold_run(folder, options.batches, options.checkpoint, options.int8, say)
    said = found.as_json()
    return _tell(options, said, [*table(said, draw.look_of(sys.stdout, os.environ)), f"written to {path}"])


def _tell(options: argparse.Namespace, said: Mapping[str, Any], lines: Sequence[str]) -> int:
    """Prints what a command found, for programs or for people; returns the exit code."""
    print(json.dumps(said, allow_nan=False, ensure_ascii=False) if options.json else "\n".join(lines))
    return 0
