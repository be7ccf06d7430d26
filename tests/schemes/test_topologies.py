"""The contract of every scheme in every topology: gradients, recomputing, saving, graphs, eps, padding, visibility."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.models.stack import Transformer
from normscale.ops.statistics import Buffers
from normscale.schemes import scheme_names
from tests.schemes.forms import built, fits
from tests.schemes.test_contract import STRUCTURES, guests

__all__ = ["guests"]  # a fixture: the two-stream schemes of the contract take part

SIZE = {"d": 16, "heads": 2, "context": 8}
TOPOLOGIES = {"encoder": {"N": 3, "M": 0}, "decoder": {"N": 0, "M": 3}, "encoder-decoder": {"N": 2, "M": 3}}
TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
SOURCE = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(1))
PAST = torch.ones(8, 8).tril().bool()
KEEP = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])

FORMS = [
    (name, topology) for name in scheme_names() for topology in TOPOLOGIES if fits(scheme=name, **TOPOLOGIES[topology])
]
FORMS += [("siamese-guest", topology) for topology in TOPOLOGIES]

every_form = pytest.mark.parametrize(("scheme", "topology"), FORMS)


def every(topology: str) -> pytest.MarkDecorator:
    """All schemes that have a topology."""
    return pytest.mark.parametrize("scheme", [scheme for scheme, found in FORMS if found == topology])


def make(scheme: str, topology: str, seed: int = 0, **options: Any) -> Transformer:
    if scheme == "rezero":  # whose branches reach nothing at first
        options["scheme_options"] = {"start": 0.5}
    return built(seed, **SIZE | TOPOLOGIES[topology] | {"scheme": scheme} | options)


def beside(topology: str) -> dict[str, Tensor]:
    return {"source_BS": SOURCE, "source_keep_BS": KEEP} if topology == "encoder-decoder" else {}


def loud(model: Transformer) -> Transformer:
    """Makes branches large against the stream, so that what reaches an output shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


@every_form
def test_gradients_reach_every_parameter_and_recomputing_changes_none(scheme: str, topology: str) -> None:
    found = []
    for checkpointing in (False, True):
        model = make(scheme, topology, checkpointing=checkpointing)
        rows = torch.full((len(model.sites()) * model.rows_per_site, 3), -1.0)
        model(TOKENS, Buffers(rows), **beside(topology)).square().mean().backward()
        assert (rows >= 0).all()
        found.append((rows, model))
    assert torch.equal(found[0][0], found[1][0])
    for (name, a), b in zip(found[0][1].named_parameters(), found[1][1].parameters(), strict=True):
        assert a.grad is not None, name
        assert torch.isfinite(a.grad).all(), name
        assert torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]


@every_form
def test_sites_and_their_parameters_agree(scheme: str, topology: str) -> None:
    embedding_norm = scheme != "ngpt"  # which refuses one
    model = make(scheme, topology, positions="learned", embedding_norm=embedding_norm, tied=False)
    sites, groups = model.sites(), model.site_parameters()
    assert [site.index for site in sites] == list(range(len(groups)))
    assert [sublayer.rows_of_site.tolist()[0] for sublayer in model.sublayers()] == [
        site.index * model.rows_per_site for site in sites
    ]
    for site, names in zip(sites, groups, strict=True):
        blocks_before = TOPOLOGIES[topology]["N"] if site.side == "decoder" else 0
        assert names
        assert all(name.startswith(f"blocks.{blocks_before + site.block}.sublayers.{site.kind}.") for name in names)
        assert {model.site_of(name) for name in names} == {site.index}
    inside = {name for names in groups for name in names}
    outside = {name for name, _ in model.named_parameters()} - inside
    assert {model.site_of(name) for name in outside} == {-1}
    assert all(not name.startswith("blocks.") for name in outside)


@every_form
def test_a_saved_model_loads_into_a_fresh_one(scheme: str, topology: str) -> None:
    one, other = make(scheme, topology, positions="learned"), make(scheme, topology, 1, positions="learned")
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(TOKENS, **beside(topology)), other(TOKENS, **beside(topology)))


def compiled_forms() -> list[tuple[str, str]]:
    """A decoder's graphs are counted in the contract; an encoder's where there is none beside a decoder."""
    both = [name for name, topology in FORMS if topology == "encoder-decoder" and name in scheme_names()]
    return [(name, "encoder-decoder" if name in both else "encoder") for name in scheme_names()] + [("post", "encoder")]


@pytest.mark.parametrize(("scheme", "topology"), compiled_forms())
def test_one_graph_for_each_structure(scheme: str, topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend="eager", fullgraph=True))
    eager, compiled = make(scheme, topology), make(scheme, topology, compile=True)
    counters.clear()
    got, want = (model(TOKENS, **beside(topology)) for model in (compiled, eager))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert compiled.structures == (2 if topology == "encoder-decoder" else STRUCTURES.get(scheme, 1))
    assert counters["stats"]["unique_graphs"] == compiled.structures


@pytest.mark.parametrize(("scheme", "topology"), [form for form in FORMS if form[0] != "ngpt"])  # has no eps
def test_eps_reaches_every_norm(scheme: str, topology: str) -> None:
    options = {"embedding_norm": True, "qk_norm": "head", "kv_latent": 8}
    if scheme == "hybridnorm":  # norms q and k itself
        options["qk_norm"] = "none"
    model = make(scheme, topology, eps=0.125, **options)
    attentions = sum(site.kind != "ffn" for site in model.sites())
    found = [m.eps for m in model.modules() if hasattr(m, "eps_tensor")]
    sites = len(model.sites()) if model.scheme.has_norms else 0
    assert len(found) >= sites + 3 * attentions + (2 if topology == "encoder-decoder" else 1)
    assert set(found) == {0.125}


@every("encoder-decoder")
def test_padding_of_the_source_changes_nothing(scheme: str) -> None:
    model = loud(make(scheme, "encoder-decoder"))
    want = model(TOKENS[1:], source_BS=SOURCE[1:, :4])
    for rest in (SOURCE[1:, 4:], (SOURCE[1:, 4:] + 5) % 32):
        source = torch.cat([SOURCE[1:, :4], rest], dim=1)
        torch.testing.assert_close(model(TOKENS[1:], source_BS=source, source_keep_BS=KEEP[1:]), want)
        assert (model(TOKENS[1:], source_BS=source) - want).abs().max() > 1e-3  # the mask alone hides it


@every("encoder")
def test_an_encoder_alone_takes_a_mask_of_its_tokens(scheme: str) -> None:
    keep = torch.tensor([[True] * 5 + [False] * 3, [True] * 8])
    encoder = loud(make(scheme, "encoder"))
    padded = encoder(TOKENS, source_keep_BS=keep)
    torch.testing.assert_close(padded[:1, :5], encoder(TOKENS[:1, :5]))


def reaches(model: Transformer, of: str, **inputs: Tensor) -> Tensor:
    """Whether the embedding of input position j reaches output position i: [output, input]."""
    seen = []
    real = model._embed
    kept: list[Tensor] = []

    def embed(tokens: Tensor, *rest: Any) -> Tensor:
        kept.append(real(tokens, *rest))
        return kept[-1]

    model._embed = embed  # type: ignore[method-assign]
    out = model.features(TOKENS[:1], **inputs)
    emb = kept[0 if of == "source" else -1]
    for i in range(out.shape[1]):
        (grad,) = torch.autograd.grad(out[0, i].square().sum() + out[0, i].sum(), emb, retain_graph=True)
        seen.append(grad[0].abs().sum(-1) > 0)
    return torch.stack(seen)


@every("decoder")
def test_a_decoder_sees_the_past(scheme: str) -> None:
    assert torch.equal(reaches(make(scheme, "decoder"), "tokens"), PAST)


@every("encoder")
def test_an_encoder_sees_everything(scheme: str) -> None:
    assert reaches(make(scheme, "encoder"), "tokens").all()


@every("encoder-decoder")
def test_a_decoder_beside_an_encoder_sees_the_past_and_the_whole_source(scheme: str) -> None:
    assert torch.equal(reaches(make(scheme, "encoder-decoder"), "tokens", source_BS=SOURCE[:1]), PAST)
    assert reaches(make(scheme, "encoder-decoder"), "source", source_BS=SOURCE[:1]).all()


@every("encoder-decoder")
def test_the_encoder_output_reaches_every_decoder_block(scheme: str) -> None:
    model = loud(make(scheme, "encoder-decoder"))
    streams: list[list[Tensor]] = [[], []]
    for source, outputs in zip((SOURCE, (SOURCE + 1) % 32), streams, strict=True):
        model.features(TOKENS, source_BS=source, outputs=outputs)
    changes = [float((a - b).abs().max()) for a, b in zip(*streams, strict=True)]
    assert len(changes) == (2 + 1) + (3 + 1)
    assert min(changes[:3]) > 1e-3
    assert changes[3] == 0.0  # the decoder's own embedding
    # Each block by itself: without the cross-attention of the others, its own still brings the source in.
    for keep in (2, 3, 4):
        outputs_of = []
        for source in (SOURCE, (SOURCE + 1) % 32):
            single = loud(make(scheme, "encoder-decoder"))
            for i in {2, 3, 4} - {keep}:
                single.blocks[i].sublayers["cross"].branch.o.register_forward_hook(lambda m, x, y: torch.zeros_like(y))
            outputs_of.append(single.features(TOKENS, source_BS=source))
        assert (outputs_of[0] - outputs_of[1]).abs().max() > 1e-4, keep
