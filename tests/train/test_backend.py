"""`model.backend`: what the norms of a model run on, told before, refused in one line, recorded after."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normscale.cli import main
from normscale.config.precision import PrecisionConfig
from normscale.config.schema import ModelConfig, RunConfig
from normscale.errors import BackendError
from normscale.models.builder import build
from normscale.models.plan import resolve
from normscale.norms import Norm
from normscale.norms import norm as norm_module
from normscale.ops import backends
from normscale.ops.backends import WIDEST
from normscale.ops.handles import Opening
from normscale.ops.norm import normalise
from normscale.schemes import find_scheme, scheme_names
from normscale.tracking.reader import read_run
from normscale.train import identity as identities
from normscale.train.backend import norm_backend
from normscale.train.engines.plain import PlainEngine
from normscale.train.identity import identity
from normscale.train.run import run

TINY = {"M": 1, "d": 8, "heads": 2, "context": 8}
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available() or backends.INTERPRETED, reason="needs a machine without a GPU"
)


def told(device: str, precision: dict[str, Any] | None = None, **model: Any) -> str:
    return norm_backend(resolve(ModelConfig(**TINY | model)), PrecisionConfig(**precision or {}), device)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON", "LIGER", "APEX"):
        monkeypatch.setattr(backends, name, True)
    monkeypatch.setattr(backends, "INTERPRETED", False)


@pytest.mark.usefixtures("_installed")
def test_what_would_run_is_told_for_every_norm_of_the_model() -> None:
    assert told("cpu") == told("cuda", backend="eager") == "eager"
    assert told("cuda") == told("cuda", backend="triton") == told("cuda", compile=True) == "triton"
    wide = {"d": 20_000, "heads": 2}
    assert told("cuda", **wide) == f"eager (width 20000 > {WIDEST})"
    assert told("cuda", **wide, qk_norm="head", kv_latent=64) == f"triton; eager (width 20000 > {WIDEST})"
    assert told("cuda", **wide, qk_norm="full") == f"eager (width 20000 > {WIDEST})"
    assert told("cuda", backend="liger") == "liger"
    assert told("cuda", norm="dyt") == "eager (this norm has no kernel)"
    for norms in ({"ffn": "dyt"}, {"attention": {"norm": "layernorm", "norm_options": {"eps_place": "outside"}}}):
        assert told("cuda", norms=norms) == "triton; eager (this norm has no kernel)"
    assert told("cuda", scheme="rezero") == "eager"  # where there are none
    assert told("cuda", scheme="rezero", qk_norm="head") == "triton"


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("model", "precision", "says"),
    [
        ({"backend": "triton", "d": 20_000}, {}, "triton cannot run here: width 20000 > 16384"),
        ({"backend": "triton", "norms": {"ffn": "dyt"}}, {}, "triton cannot run here: this norm has no kernel"),
        ({"backend": "triton", "qk_norm": "l2"}, {}, "triton cannot run here: this norm has no kernel"),
        ({"backend": "liger", "norm_options": {"bias": False}}, {}, "it is offered for norms with bias only"),
        ({"backend": "apex"}, {"stream": "bf16"}, "weights in float32 beside activations in bfloat16"),
        ({"backend": "apex"}, {"params": "bf16"}, "weights in bfloat16 beside activations in float32"),
        ({"backend": "apex", "qk_norm": "head"}, {"compute": "bf16"}, "float32 beside activations in bfloat16"),
        ({"backend": "apex", "kv_latent": 4}, {"compute": "fp16"}, "float32 beside activations in float16"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_built(model: Any, precision: Any, says: str) -> None:
    with pytest.raises(BackendError, match=says):
        told("cuda", precision, **model)


FORMS = {name: (name, {}) for name in scheme_names()} | {
    "mHC": ("hyper", {"form": "mhc"}),
    "HybridNorm*": ("hybridnorm", {"star": True}),
    "NormFormer, all of it": ("normformer", {"scale_resids": True, "heads": "fairseq"}),
}


def shape_of(form: str) -> dict[str, Any]:
    """A small model of a scheme, or of a form of one."""
    name, options = FORMS[form]
    depth = {"M": 3} if "decoder" in find_scheme(name).topologies else {"N": 2, "M": 2}
    return TINY | depth | {"scheme": name, "scheme_options": options}


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_of_another_width_than_the_streams_is_told(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shape_of(form)
    monkeypatch.setattr(backends, "WIDEST", model["d"])
    widths = {m.width for m in build(ModelConfig(**model), 16, 0).modules() if isinstance(m, Norm)}
    wide = [f"eager (width {width} > 8)" for width in widths if width > 8]
    assert told("cuda", **model) == backends.joined({*wide, *(["triton"] if min(widths, default=9) <= 8 else [])})
    if wide:
        with pytest.raises(BackendError, match="triton cannot run here: width"):
            told("cuda", **model, backend="triton")


@pytest.mark.usefixtures("_installed")
def test_the_widths_that_schemes_make_of_the_streams_are_told() -> None:
    for scheme in ("subln", "normformer"):
        assert told("cuda", scheme=scheme, d=5120) == f"triton; eager (width 20480 > {WIDEST})"
    mhc = {"scheme": "hyper", "scheme_options": {"form": "mhc"}, "d": 4608}
    assert told("cuda", **mhc) == f"triton; eager (width 18432 > {WIDEST})"


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("stream", ["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_apex_is_told_or_refused_as_the_first_pass_would(
    form: str, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs norms whose weights have the dtype of what they norm: of the stream, or of what a branch puts out."""
    precision: dict[str, Any] = {"compute": "bf16", "stream": stream, "params": stream}
    settings: dict[str, Any] = shape_of(form) | {"backend": "apex"}
    monkeypatch.setattr(norm_module, "peer_norm", lambda _, *of: normalise(*of))
    engine = PlainEngine(build(ModelConfig(**settings), 16, 0), PrecisionConfig(**precision), torch.device("cpu"))
    token = torch.zeros(1, 4, dtype=torch.int64)

    def first_pass() -> str:
        with backends.counted_as("cuda"), backends.noted() as ran, engine.aside() as model:
            model.features(token, source_BS=token if model.source_ends is not None else None)
        return backends.joined(ran)

    assert outcome(lambda: told("cuda", precision, **settings)) == outcome(first_pass)


def outcome(of: Callable[[], str]) -> str:
    try:
        return of()
    except BackendError as error:
        return str(error)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16", "fp8_e4m3"])
def test_the_kernels_fit_every_precision(compute: str) -> None:
    for params in ("fp32", "bf16"):
        precision = {"compute": compute, "stream": "bf16", "params": params}
        assert told("cuda", precision, qk_norm="head", kv_latent=4) == "triton"


def test_every_norm_of_a_model_runs_on_what_was_asked_for() -> None:
    options = {"N": 1, "embedding_norm": True, "qk_norm": "head", "kv_latent": 4}
    for scheme in ("post", "pre"):
        model = build(ModelConfig(**TINY | options, scheme=scheme, backend="triton"), 16, 0)
        norms = [m for m in model.modules() if isinstance(m, Norm)]
        assert len(norms) > 10
        assert {m.backend for m in model.modules() if isinstance(m, Norm | Opening)} == {"triton"}


@pytest.mark.parametrize("eps", [1e-50, 1e39])
def test_an_eps_that_fp32_cannot_hold_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match=r"is no normal number of fp32, .*; give 0, or 1.18e-38 to"):
        ModelConfig(eps=eps)
    assert ModelConfig(eps=0).eps == 0


def test_peers_are_not_compiled() -> None:
    with pytest.raises(ValueError, match=r"liger runs in eager mode only; set model.compile=false"):
        ModelConfig(backend="liger", compile=True)


@without_gpu
@pytest.mark.parametrize("command", ["check", "train"])
def test_a_backend_that_needs_a_gpu_is_one_line_with_its_place(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model:\n  M: 1\n  backend: triton\n")
    code = main([command, str(file), f"tracking.runs={tmp_path / 'runs'}", "tracking.uri=null"])
    said = capsys.readouterr().err.strip()
    assert code == 2
    assert said.endswith(
        "model.backend: triton cannot run here: its kernels run on a GPU, and this is a CPU;"
        f" set model.backend=auto, or eager ({file}:3)"
    )
    assert "\n" not in said
    assert not (tmp_path / "runs").exists()


@without_gpu
@pytest.mark.parametrize(("value", "says"), [("tritn", "triton"), ("liger", "the package liger-kernel is not inst")])
def test_a_wrong_word_or_a_missing_package_is_one_line(
    value: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "LIGER", False)
    file = tmp_path / "a.yaml"
    file.write_text("model: {M: 1}\n")
    assert main(["check", str(file), f"model.backend={value}"]) == 2
    said = capsys.readouterr().err.strip()
    assert "model.backend" in said
    assert says in said
    assert "\n" not in said


@without_gpu
def test_the_record_says_what_ran_and_check_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(
        model=TINY | {"context": 16},
        data={"max_bytes": 20_000},
        train={"steps": 1, "batch": 2, "eval_batches": 1},
        tracking={"runs": str(tmp_path), "uri": None},
    )
    start = read_run(run(config).run_dir).start
    assert start["backend"]["norm"] == "eager"
    assert start["backend"]["attention"]
    file = tmp_path / "a.yaml"
    file.write_text("model: {M: 1}\n")
    assert main(["check", str(file), "--yaml"]) == 0
    shown = capsys.readouterr().out
    assert "# norms       eager" in shown
    assert "backend: auto" in shown


def test_the_backend_and_what_it_comes_to_are_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(model=TINY, data={"max_bytes": 20_000})
    eager = config.model_copy(update={"model": config.model.model_copy(update={"backend": "eager"})})
    hashes = {identity(config)["hash"], identity(eager)["hash"]}
    assert len(hashes) == 2
    assert identity(config)["norms"] == "eager"
    monkeypatch.setattr(identities, "version", lambda package: f"9 of {package}")
    for backend, norms in {
        "triton": "triton, triton 9 of triton",
        "triton; eager (why)": "triton; eager (why), triton 9 of triton",
        "liger": "liger, triton 9 of triton, liger-kernel 9 of liger-kernel",
        "apex": "apex, apex 9 of apex",
        "eager (why)": "eager (why)",
    }.items():
        monkeypatch.setattr(identities, "norm_backend", lambda *of, backend=backend: backend)
        assert identity(config)["norms"] == norms
        assert identity(config)["hash"] not in hashes
