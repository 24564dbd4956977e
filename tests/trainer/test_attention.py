import numpy as np
import pytest
import torch

from tailrace.trainer.attention import make_layout, prompt_shared_attention
from tailrace.trainer.packing import PartSpan

HEADS, KV_HEADS, SIZE = 6, 2, 8
SPANS = (
    PartSpan(start=0, prompt_tokens=4, response_tokens=(3, 40, 1, 35, 5)),
    PartSpan(start=88, prompt_tokens=1, response_tokens=(2,)),
    PartSpan(start=91, prompt_tokens=3, response_tokens=(1, 1)),
)
TOKENS = 96


def visible() -> torch.Tensor:
    """The definition of the tokens that each token may attend to, bool [T, T]."""
    owner = np.full(TOKENS, -1)
    part = np.zeros(TOKENS, np.int64)
    for number, span in enumerate(SPANS):
        cursor = span.start + span.prompt_tokens
        part[span.start :] = number
        for response, tokens in enumerate(span.response_tokens):
            owner[cursor : cursor + tokens] = response
            cursor += tokens
    same_part = part[:, None] == part
    prompt_or_own = (owner == -1) | (owner[:, None] == owner)
    return torch.from_numpy(same_part & prompt_or_own & np.tri(TOKENS, dtype=bool))


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, TOKENS, SIZE, generator=generator).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def attend(inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    layout = make_layout(SPANS, torch.device("cpu"))
    out, weights = prompt_shared_attention(torch.nn.Module(), query, key, value, None, layout=layout, scaling=0.3)
    assert weights is None
    return out


def test_output_and_gradients_equal_masked_attention_over_the_whole_row() -> None:
    inputs = tensors()
    query, key, value = inputs
    repeated = [tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value)]
    scores = (query @ repeated[0].transpose(2, 3) * 0.3).masked_fill(~visible(), -torch.inf)
    expected = (scores.softmax(-1) @ repeated[1]).transpose(1, 2)
    found = attend(inputs)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for got, want in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("token", [0, 5, 7, 46, 47, 82, 88, 95])
def test_a_token_reaches_only_what_may_look_at_it(token: int) -> None:
    before = attend(tensors())
    changed = tensors()
    with torch.no_grad():
        for tensor in changed[1:]:
            tensor[:, :, token] += 1
    moved = (attend(changed) - before).abs().amax((0, 2, 3)) > 1e-6
    assert torch.equal(moved, visible()[:, token])


def test_bf16_values_come_with_a_result_that_rounds_to_fp32_attention() -> None:
    inputs = tensors()
    rounded = [tensor.detach().bfloat16() for tensor in inputs]
    exact = attend([tensor.float() for tensor in rounded])
    torch.testing.assert_close(attend(rounded).float(), exact, atol=1e-6, rtol=1e-6)


def test_a_long_response_does_not_make_short_ones_as_long() -> None:
    layout = make_layout((PartSpan(start=0, prompt_tokens=4, response_tokens=(1000, *[100] * 9)),), torch.device("cpu"))
    (block,) = layout.blocks
    assert [(len(rows.prompt_R), rows.width) for rows in block.rows] == [(9, 100), (1, 1000)]
    assert len(layout.pad_N) == len(layout.unpad_T) == 4 + 1900


def test_short_sequences_of_all_parts_lie_together_and_long_ones_with_their_own_part() -> None:
    layout = make_layout(
        (
            PartSpan(start=0, prompt_tokens=9, response_tokens=(3, 300)),
            PartSpan(start=312, prompt_tokens=5, response_tokens=(8, 8, 300)),
            PartSpan(start=633, prompt_tokens=300, response_tokens=(7,)),
        ),
        torch.device("cpu"),
    )
    assert [(block.prompts, block.width) for block in layout.blocks] == [(2, 9), (1, 300)]
    found = [[rows.prompt_R.tolist() for rows in block.rows] for block in layout.blocks]
    assert found == [[[0, 1, 1], [0], [1]], [[0]]]
