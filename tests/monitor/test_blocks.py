import pytest
import torch
from torch import nn

from normscale.errors import BadInput
from normscale.monitor.blocks import find_blocks, inner_of
from tests.monitor.made import Block, net


def test_the_blocks_of_a_stack_are_found_in_order() -> None:
    assert list(find_blocks(net(12), None)) == [f"blocks.{i}" for i in range(12)]


def test_lists_inside_blocks_are_no_blocks_however_long() -> None:
    class Experts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(64))

    model = nn.Module()
    model.layers = nn.ModuleList(Experts() for _ in range(3))
    assert list(find_blocks(model, None)) == ["layers.0", "layers.1", "layers.2"]


def test_both_stacks_of_an_encoder_and_decoder_are_taken_and_bare_linears_are_not() -> None:
    model = nn.Module()
    model.bottom = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model.encoder, model.decoder = nn.Module(), nn.Module()
    model.encoder.layers = nn.ModuleList(Block() for _ in range(4))
    model.decoder.layers = nn.ModuleList(Block() for _ in range(2))
    found = find_blocks(model, None)
    assert list(found) == [f"encoder.layers.{i}" for i in range(4)] + ["decoder.layers.0", "decoder.layers.1"]


def test_a_model_without_a_stack_has_its_children_or_itself() -> None:
    assert list(find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), None)) == ["0", "2"]
    assert list(find_blocks(nn.Linear(2, 2), None)) == [""]


def test_blocks_are_named_by_pattern_name_or_module() -> None:
    model = net(3)
    assert list(find_blocks(model, r"blocks\.\d+\.proj")) == ["blocks.0.proj", "blocks.1.proj", "blocks.2.proj"]
    assert list(find_blocks(model, [model.head, "blocks.1"])) == ["head", "blocks.1"]
    assert find_blocks(model, ()) == {}


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("layers.*", "matches no module; names are as"),
        ("(", "is no regular expression"),
        (["blocks.7"], "no module 'blocks.7'; did you mean"),
        ([nn.Linear(1, 1)], "a Linear that was given is no module of the model"),
    ],
)
def test_what_names_no_block_is_refused(wanted: object, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        find_blocks(net(3), wanted)  # type: ignore[arg-type]


def test_wrappers_are_opened_and_names_are_the_owners() -> None:
    model = net(2)
    for i in range(2):
        model.blocks[i] = torch.compile(model.blocks[i], backend="eager")
    assert inner_of(torch.compile(model)) is model
    assert list(find_blocks(model, None)) == ["blocks.0", "blocks.1"]
