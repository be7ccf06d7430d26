"""Which backend runs what, and the one line that says why another does not."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import BackendError, BadInput
from normscale.norms import find_norm
from normscale.ops import backends, peers
from normscale.ops.add_norm import add_norm
from normscale.ops.backends import BACKENDS, WIDEST, choose, noted, would_run
from normscale.ops.handles import Handle, residual_norm_handle
from normscale.ops.norm import layernorm, rmsnorm
from normscale.ops.residual_norm import residual_norm
from normscale.ops.spec import NormSpec

LN, RMS = NormSpec("layernorm", 1e-5), NormSpec("rmsnorm", 1e-5)
HALF = torch.bfloat16


def on_gpu(
    backend: str, width: int = 64, dtype: torch.dtype = torch.float32, spec: NormSpec | None = LN, **case: Any
) -> Any:
    weight = torch.ones(1, dtype=case.get("params", torch.float32))
    gamma, bias = case.get("gamma", weight), case.get("bias", weight)
    return would_run(backend, case.get("op", "norm"), spec, width, dtype, case.get("device", "cuda"), gamma, bias)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON", "LIGER", "APEX"):
        monkeypatch.setattr(backends, name, True)
    monkeypatch.setattr(backends, "INTERPRETED", False)


def test_the_configuration_knows_the_registered_backends() -> None:
    assert get_args(ModelConfig.model_fields["backend"].annotation) == BACKENDS
    assert set(BACKENDS) == {"auto", "eager", *backends.REASONS}


@pytest.mark.usefixtures("_installed")
def test_auto_takes_kernels_on_a_gpu_and_says_why_where_it_does_not() -> None:
    assert on_gpu("auto") == on_gpu("triton") == ("triton", "")
    assert on_gpu("auto", WIDEST) == ("triton", "")
    assert on_gpu("auto", WIDEST + 1) == ("eager", f"width {WIDEST + 1} > {WIDEST}")
    assert on_gpu("auto", dtype=torch.float64)[0] == "eager"
    assert on_gpu("auto", spec=None) == ("eager", "this norm has no kernel")
    assert on_gpu("auto", device="cpu") == ("eager", "")
    assert on_gpu("eager") == ("eager", "")
    for dtype in (torch.float16, HALF):
        assert on_gpu("auto", dtype=dtype, gamma=None, bias=None) == ("triton", "")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"backend": "triton", "device": "cpu"}, "its kernels run on a GPU, and this is a CPU"),
    ({"backend": "triton", "device": "mps"}, "its kernels run on a GPU, and this is mps"),
    ({"backend": "triton", "dtype": torch.float64}, "float64 has no kernel (float32, bfloat16 and float16 have)"),
    ({"backend": "triton", "width": 20_000}, "width 20000 > 16384"),
    ({"backend": "triton", "spec": None}, "this norm has no kernel"),
    ({"backend": "liger", "device": "cpu"}, "its kernels run on a GPU"),
    ({"backend": "liger", "op": "residual_norm"}, "it has no residual_norm"),
    ({"backend": "liger", "bias": None}, "it is offered for norms with bias only"),
    ({"backend": "liger", "gamma": None, "bias": None}, "it is offered for norms with gamma and bias only"),
    ({"backend": "liger", "width": 70_000}, "width 70000 > 65536"),
    ({"backend": "liger", "dtype": torch.float64}, "float64 has no kernel"),
    ({"backend": "apex", "device": "cpu"}, "its kernels run on a GPU"),
    ({"backend": "apex", "op": "add_norm"}, "it has no add_norm"),
    ({"backend": "apex", "spec": NormSpec("rmsnorm", 1e-5, True)}, "it has no zero-centred gain"),
    ({"backend": "apex", "dtype": HALF}, "weights in float32 beside activations in bfloat16 change the stream's dtype"),
    ({"backend": "apex", "spec": RMS, "gamma": None}, "it is offered for norms with gamma only"),
]


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(("case", "reason"), REFUSED)
def test_a_named_backend_that_cannot_run_is_one_clear_line(case: dict[str, Any], reason: str) -> None:
    with pytest.raises(BackendError) as caught:
        on_gpu(**case)
    said = str(caught.value)
    assert said.startswith(f"model.backend: {case['backend']} cannot run here: {reason}")
    assert said.endswith("; set model.backend=auto, or eager")
    assert "\n" not in said
    assert (caught.value.exit_code, caught.value.key) == (2, "model.backend")


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("triton", "the package triton is not installed"),
        ("liger", "the package liger-kernel is not installed"),
        ("apex", "the package apex is not installed with its extension fused_layer_norm_cuda"),
        ("tritn", r"'tritn' is not a backend \(allowed: auto, eager, triton, apex, liger\)"),
    ],
)
def test_what_is_not_there_says_so(backend: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON", "LIGER", "APEX"):
        monkeypatch.setattr(backends, name, False)
    with pytest.raises(BackendError, match=says):
        on_gpu(backend)


@pytest.mark.usefixtures("_installed")
def test_choices_are_noted_while_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, wide = torch.ones(2, 8, device="meta"), torch.ones(2, 20_000, device="meta")
    monkeypatch.setattr(backends, "REASONS", backends.REASONS | {"triton": lambda case: None})
    with noted() as ran:
        assert choose("auto", "norm", LN, x, None, None) == "eager"
        assert choose("triton", "norm", LN, x, None, None) == "triton"
        assert choose("triton", "norm", LN, wide, None, None) == "triton"
    choose("triton", "norm", LN, x, None, None)
    assert ran == {"eager", "triton"}
    assert backends.joined(ran) == "triton; eager"
    assert backends.joined(set()) == "eager"


@pytest.mark.skipif(torch.cuda.is_available() or backends.INTERPRETED, reason="needs a machine without a GPU")
def test_the_operations_do_not_launch_where_there_is_no_gpu() -> None:
    from normscale.ops.norm import norm

    x, gamma = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(BadInput, match=r"model.backend: triton cannot run here: its kernels run on a GPU"):
        norm(x, gamma, gamma, LN, backend="triton")
    torch.testing.assert_close(norm(x, gamma, gamma, LN, backend="auto"), norm(x, gamma, gamma, LN))


@pytest.mark.usefixtures("_installed")
def test_a_wider_residual_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    monkeypatch.setitem(backends.REASONS, "triton", lambda case: seen.append(case.dtype))
    x, alpha = torch.randn(2, 8), torch.tensor(1.0)
    for dtype, wider in ((torch.float64, torch.float64), (HALF, torch.float32), (torch.float32, torch.float32)):
        assert choose("triton", "add_norm", LN, x, None, None, x.to(dtype)) == "triton"
        assert seen[-1] is wider
    monkeypatch.undo()
    monkeypatch.setattr(backends, "TRITON", True)
    monkeypatch.setattr(backends, "INTERPRETED", True)
    wide, handle, none = x.double(), Handle(x, alpha), (None, None, LN)
    norm = find_norm("layernorm")(8, 1e-5, find_norm("layernorm").Options())
    norm.backend = "triton"
    for call in (
        lambda: add_norm(wide, x, *none, backend="triton"),
        lambda: residual_norm(wide, x, alpha, *none, backend="triton"),
        lambda: residual_norm_handle(wide, handle, x, alpha, *none),
        lambda: norm.residual(wide, x, alpha),
    ):
        with pytest.raises(BackendError, match="float64 has no kernel"):
            call()


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch, _installed: None) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("_gpu")
def test_a_gpu_that_triton_does_not_serve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (asked.append(index), (7, 5))[1])
    backends._capability.cache_clear()
    reason = "its kernels need compute capability 8.0, and this GPU has 7.5"
    try:
        for _ in range(2):
            assert on_gpu("auto") == ("eager", reason)
        with pytest.raises(BackendError, match=f"triton cannot run here: {reason}; set"):
            on_gpu("triton")
        assert asked == [0]  # once a device
        monkeypatch.setattr(torch.version, "hip", "6.2")
        assert on_gpu("auto") == ("triton", "")
    finally:
        backends._capability.cache_clear()


class On:
    """Stands for a tensor on a GPU."""

    def __init__(self, device: str) -> None:
        self.device, self.dtype, self.shape = torch.device(device), torch.float32, (2, 8)


@pytest.mark.usefixtures("_gpu")
def test_the_gpu_that_is_asked_is_that_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_capability", lambda index: ((9, 0), (7, 5))[index])
    for device, runs in (("cuda:0", "triton"), ("cuda:1", "eager"), ("cuda", "triton")):
        assert choose("auto", "norm", LN, On(device), None, None) == runs  # type: ignore[arg-type]


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("index", [None, 1])
@pytest.mark.parametrize(("has", "runs"), [((7, 5), "eager"), ((8, 0), "triton"), ((12, 0), "triton")])
def test_the_check_of_the_gpu_stays_out_of_compiled_graphs(
    has: tuple[int, int], runs: str, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_capability", lambda asked: has if asked == (index or 0) else None)
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def add(x: Tensor) -> Tensor:
        chosen, _ = would_run("auto", "norm", LN, 8, x.dtype, "cuda", None, None, index)
        return x + (1 if chosen == "triton" else 2)

    assert add(torch.zeros(1)).item() == (1 if runs == "triton" else 2)


class Called:
    """Stands for another project's autograd function: notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *of: Any) -> Tensor:
        self.calls.append(of)
        return of[0]

    apply = __call__


def test_peers_are_called_so_that_they_mean_our_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType, SimpleNamespace

    ln, rms = Called(), Called()
    fakes = {
        "liger_kernel.ops.layer_norm": {"LigerLayerNormFunction": ln},
        "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": rms},
        "apex.normalization": {
            "fused_layer_norm": SimpleNamespace(fused_layer_norm_affine=ln, fused_rms_norm_affine=rms)
        },
    }
    for name, parts in fakes.items():
        for at in range(1, name.count(".") + 2):
            package = ".".join(name.split(".")[:at])
            if package not in fakes:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        module = ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    x, gamma, bias = torch.randn(2, 3, 8), torch.ones(8), torch.zeros(8)
    centred = NormSpec("rmsnorm", 1e-6, True)
    assert peers.norm("liger", x, gamma, bias, LN) is x
    peers.norm("liger", x, gamma, None, centred)
    peers.norm("apex", x, gamma, bias, LN)
    peers.norm("apex", x, gamma, None, RMS)
    assert [call[-1] for call in ln.calls] == [1e-5, 1e-5]
    assert ln.calls[0][1] is gamma
    assert ln.calls[1][3] == (8,)
    assert rms.calls[0][2:] == (1e-6, 1.0, "gemma", False)  # fp32 throughout; dy is not written over
    assert rms.calls[1][2:] == ((8,), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["liger", "apex"])
@pytest.mark.parametrize("spec", [LN, RMS, NormSpec("rmsnorm", 1e-5, True)], ids=["ln", "rms", "centred"])
def test_peers_give_our_definition_where_they_are_installed(backend: str, spec: NormSpec) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 7, 96, device="cuda", requires_grad=True)
    gamma = torch.randn(96, device="cuda", requires_grad=True)
    bias = torch.randn(96, device="cuda", requires_grad=True) if spec.kind == "layernorm" else None
    try:
        choose(backend, "norm", spec, x, gamma, bias)
    except BackendError as refused:
        pytest.skip(str(refused))
    weights = [w for w in (x, gamma, bias) if w is not None]
    gain = 1 + gamma if spec.zero_centred else gamma
    want = layernorm(x, gain, bias, spec.eps) if spec.kind == "layernorm" else rmsnorm(x, gain, spec.eps)
    got = peers.norm(backend, x, gamma, bias, spec)
    dy = torch.randn_like(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(got, weights, dy), torch.autograd.grad(want, weights, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("liger", r"this is a CPU; also the package liger-kernel is not installed \(pip install liger-kernel\)"),
        ("apex", r"this is a CPU; also the package apex is not installed .* \(build it from github.com/NVIDIA/apex"),
    ],
)
def test_a_package_that_would_not_help_here_is_named_second(
    backend: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LIGER", "APEX"):
        monkeypatch.setattr(backends, name, False)
    with pytest.raises(BackendError, match=says):
        on_gpu(backend, device="cpu")
