import torch

from generators.token_loop import truncated


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    assert truncated(logits, top_p=1.0, top_k=2).isfinite().tolist() == [[False, True, False, True]]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert truncated(logits, top_p=0.7, top_k=-1).isfinite().tolist() == [[True, True, False, False]]


def test_top_p_never_removes_the_likeliest_token() -> None:
    logits = torch.tensor([[0.1, 0.9]]).log()
    assert truncated(logits, top_p=0.01, top_k=-1).isfinite().tolist() == [[False, True]]


def test_without_truncation_the_logits_are_untouched() -> None:
    logits = torch.randn(3, 7)
    assert torch.equal(truncated(logits, top_p=1.0, top_k=-1), logits)
