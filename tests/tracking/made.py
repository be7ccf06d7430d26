"""Made-up runs and claims, as the training loop and the claim runner would leave them."""

import json
import math
from pathlib import Path

import numpy as np

from normscale.tracking.record import PROFILES
from normscale.tracking.spool import SpoolWriter

UNIGRAM = 3.15


def make_run(
    runs: Path,
    scheme: str = "post",
    depth: int = 12,
    seed: int = 0,
    *,
    steps: int = 30,
    every: int = 10,
    trains: bool = True,
    nan_at: int | None = None,
    end: bool = True,
    run_id: str | None = None,
    attempt: int = 1,
    from_step: int = 0,
    outer_run: str | None = None,
    lr: float = 1e-3,
) -> str:
    """Writes the spool of one run and returns its id."""
    run_id = run_id or f"{scheme}-L{depth:04d}-s{seed}-{abs(hash((scheme, depth, seed, lr))) % 16**10:010x}"
    rng = np.random.default_rng(seed + depth)
    sites = 2 * depth
    rows = [f"decoder.{row // 2:04d}.{'self' if row % 2 == 0 else 'ffn'}" for row in range(sites)]
    with SpoolWriter(runs / run_id, attempt) as spool:
        spool.start(
            run_id=run_id,
            from_step=from_step,
            config={
                "name": "run",
                "seed": seed,
                "model": {
                    "N": 0,
                    "M": depth,
                    "d": 64,
                    "context": 64,
                    "scheme": scheme,
                    "norm": "layernorm",
                    "eps": 1e-5,
                },
                "train": {
                    "steps": steps,
                    "batch": 8,
                    "optim": {"name": "adamw", "lr": lr},
                    "schedule": {"warmup_steps": 0},
                },
                "precision": {"compute": "fp32"},
            },
            identity={"hash": "abc", "device": "cpu", "world": 1},
            environment={"normscale": "0.1.0", "git": "0123abc", "torch": "2.13.0", "host": "here"},
            data={"name": "embedded", "digest": "d" * 64, "train_tokens": 3600000, "unigram_nats": UNIGRAM},
            model={"params": 50_000 * depth, "sites": sites},
            precision_seen={"compute": "float32", "stream": "float32"},
            rows=rows,
            outer_run=outer_run,
        )
        loss, bad_layer = 5.5, -1
        for step in range(from_step, steps + 1):
            target = 2.3 if trains else UNIGRAM
            loss = target + (5.5 - target) * math.exp(-step / (steps / 5)) + 0.02 * rng.normal()
            bad = nan_at is not None and step >= nan_at
            values = {
                "loss_train": math.nan if bad else loss,
                "nonfinite": float(bad),
                "skipped": 0.0,
                "spike": 0.0,
                "grad_norm": math.inf if bad else 1.0 + 0.1 * rng.random(),
                "grad_first": math.exp(-depth / 4 if not trains else -1),
                "grad_last": 0.5,
                "stream_first": 1.0,
                "stream_last": math.sqrt(depth) if scheme == "pre" else 1.0,
                "lr": lr,
                "tokens_s": 5000.0 + rng.random(),
                "applied": float(step),
            }
            if step % every == 0:
                values |= {"loss_val": loss, "loss_gap": UNIGRAM - loss}
            if bad:
                values = {key: value for key, value in values.items() if key not in ("loss_val", "loss_gap")}
            spool.metrics(step, step, values)
            if step % every == 0 or bad:
                slope = 0 if trains else 6
                gradient = np.exp(-slope * (1 - np.arange(sites) / sites) + 0.2 * rng.normal(size=sites)) * 0.3
                growth = np.sqrt(1 + np.arange(sites)) if scheme == "pre" else 1 + 0.02 * rng.normal(size=sites)
                if bad:
                    bad_layer = sites // 3
                    gradient[: bad_layer + 1] = np.nan
                for name in PROFILES:
                    kind = gradient if name == "grad_norm" else growth
                    spool.profile(step, name, np.zeros(sites) if name.endswith("nonfinite") else kind)
            if bad:
                spool.event(
                    step, "nonfinite", layer=bad_layer, module=rows[bad_layer], kind_of="NaN", **{"pass": "backward"}
                )
                break
        if end:
            gap = math.nan if nan_at is not None else UNIGRAM - loss
            summary = {
                "loss_val": math.nan if nan_at is not None else loss,
                "loss_train": loss,
                "gap": gap,
                "unigram_nats": UNIGRAM,
                "spike": 0.0,
                "skipped": 0,
                "bad_step": nan_at if nan_at is not None else -1,
                "bad_layer": bad_layer,
                "grad_slope": 0.1 if trains else 2.345678,
                "grad_min_end": 0.0123456,
                "steps": nan_at or steps,
                "applied": nan_at or steps,
                "seconds": 3.2,
                "tokens_s": 5000.0,
            }
            spool.end("nan" if nan_at is not None else "finished", 3 if nan_at is not None else 0, summary)
    return run_id


CULPRIT = {
    "micro_batch": 2,
    "phase": "backward",
    "module": "h.3.mlp.act",
    "type": "GELU",
    "tensor": "gradient of output",
    "kind": "NaN",
    "nan": 5,
    "pos_inf": 1,
    "neg_inf": 0,
    "of": 4096,
    "order": 41,
    "rank": 1,
    "host": "node7",
    "device": "cuda:1",
    "reproduced": True,
    "note": "in its own operations, between 'ln' and 'proj'",
    "propagators": ["h.3.mlp.fc", "h.3.ln_2", "h.2"],
}
RUN_UP = [{"step": step, "stream_rms": 1.5 * step, "stream_absmax": 10.0**step} for step in (1, 2, 3)]


def make_foreign(
    runs: Path,
    run_id: str = "gpt-20261130",
    *,
    blocks: int = 6,
    steps: int = 8,
    bad_at: int | None = None,
    **more: float,
) -> str:
    """Writes the spool of a monitored run of another loop and returns its id; `more` are scalars of that loop."""
    with SpoolWriter(runs / run_id, 1) as spool:
        spool.start(
            run_id=run_id,
            from_step=0,
            config={"name": "gpt", "monitor": {"every": 1, "clip": None}, "loop": {"lr": 3e-4, "data": "mine"}},
            identity={"device": "cpu", "world": 2, "threads": 1},
            environment={"normscale": "0.1.0", "torch": "2.13.0", "host": "here"},
            model={"class": "GPT2LMHeadModel", "params": 124_000, "sites": blocks},
            engine="ddp",
            precision_seen={"params": "float32"},
            rows=[f"h.{block}" for block in range(blocks)],
        )
        for step in range(1, steps + 1):
            bad = step == bad_at
            values = {"loss_train": math.nan if bad else 5.0 - 0.1 * step, "nonfinite": float(bad), "skipped": 0.0}
            spool.metrics(step, step, values | {f"user/{name}": value for name, value in more.items()})
            stream = np.linspace(1, 2, blocks)
            if bad:
                found = {"layer": 3, "parameter": "", "reason": "non-finite loss", "policy": "skip", "in_a_row": 2}
                spool.event(step, "nonfinite", loss=math.nan, culprit=CULPRIT, run_up=RUN_UP, **found)
            spool.profile(step, "stream_rms", np.where(bad & (np.arange(blocks) >= 3), np.nan, stream))
            spool.profile(step, "stream_grad_norm", 1 / stream)
        spool.end("finished", 0, {"loss_train": 4.2, "steps": steps, "applied": steps, "bad_step": bad_at or -1})
    return run_id


def make_manifest(runs: Path, cells: list[dict], *, verdict: dict | None = None, **fields) -> Path:
    """Writes the manifest of a claim and returns its path."""
    manifest = {
        "id": "depth-postnorm-dies",
        "profile": "cpu",
        "family": "depth",
        "says": "Post-Norm stops training as it gets deeper; Pre-Norm and DeepNorm do not.",
        "source": "arXiv:2203.00555, section 3",
        "t": 1_790_000_000_000,
        "cells": cells,
        "verdict": verdict,
        "figures": [],
        "report": None,
    } | fields
    path = runs / "claims" / f"{manifest['id']}-{manifest['profile']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest))
    return path


def cell(run: str, arm: str = "post", depth: int = 12, seed: int = 0, role: str = "main", lr: float = 1e-3) -> dict:
    """Returns one cell of a manifest."""
    name = f"L{depth:04d} {arm}"
    return {
        "run": run,
        "arm": arm,
        "cell": name,
        "depth": depth,
        "seed": seed,
        "lr": lr,
        "role": role,
        "name": f"{name} s{seed}",
    }


VERDICT = {
    "verdict": "supported",
    "headline": "SUPPORTED - Post-Norm stays at the unigram entropy from 12 layers on (gap 0.02 nats, bar: < 0.1).",
    "measured": [{"name": "gap of post at 48 layers", "value": 0.0213456, "lo": 0.0101, "hi": 0.0302, "unit": "nats"}],
    "parts": [
        {"expect": "post is stuck from 12 layers on", "verdict": "supported", "detail": "9 of 9 runs"},
        {"expect": "pre and deepnorm train at 100 layers", "verdict": "supported", "detail": "6 of 6 runs"},
    ],
}
