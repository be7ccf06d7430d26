import torch

from normscale.ops.residual import scaled_residual


def test_alpha_multiplies_the_residual_and_not_the_branch() -> None:
    z = scaled_residual(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.tensor(3.0))
    torch.testing.assert_close(z, torch.tensor([13.0, 26.0]))


def test_alpha_may_be_one_number_a_channel() -> None:
    z = scaled_residual(torch.ones(2, 2), torch.zeros(2, 2), torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(z, torch.tensor([[3.0, 4.0], [3.0, 4.0]]))


def test_the_stream_stays_in_fp32_beside_a_bf16_branch() -> None:
    z = scaled_residual(torch.ones(2), torch.ones(2, dtype=torch.bfloat16), torch.tensor(1.00390625))
    assert z.dtype is torch.float32
    torch.testing.assert_close(z, torch.tensor([2.00390625, 2.00390625]), rtol=0, atol=0)


def test_the_wider_dtype_wins_on_either_side() -> None:
    z = scaled_residual(torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 1.00390625), torch.tensor(1.0))
    assert z.dtype is torch.float32
    torch.testing.assert_close(z, torch.tensor([2.00390625, 2.00390625]), rtol=0, atol=0)


def test_a_bf16_stream_is_not_widened_by_an_fp32_alpha() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    assert scaled_residual(half, half, torch.tensor(2.0)).dtype is torch.bfloat16
