"""The score of a batch."""

import pytest
import torch

from common.metrics import accuracy


def test_accuracy():
    """Of classes and of probabilities; the best k of less than k classes are all."""
    scores = torch.tensor([[3.0, 2, 1], [1, 3, 2], [1, 2, 3], [2, 3, 1]])
    classes = torch.tensor([0, 2, 1, 2])
    mixed = torch.eye(3)[classes] * 0.75 + 0.25 / 3
    for target in (classes, mixed):
        found = accuracy(scores, target, topk=(1, 2, 5))
        assert [x.item() for x in found] == [25, 75, 100] and found[0].dtype == torch.float64


def test_targets_of_several_classes_are_refused():
    with pytest.raises(ValueError, match=r"need BCEWithLogitsLoss and another score$"):
        accuracy(torch.zeros(2, 3), torch.tensor([[1.0, 1, 0], [0, 1, 0]]))
