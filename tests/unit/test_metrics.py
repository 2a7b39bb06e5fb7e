"""The score of a batch."""

import pytest
import torch
import torch.distributed as dist

from common.metrics import AverageMeter, accuracy, reduce_mean


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


def test_scores_of_one_class_are_refused():
    for target in (torch.tensor([0.0, 1]), torch.eye(2).long()):
        with pytest.raises(ValueError, match=r"^scores \[n, classes\] and targets \[n\]"):
            accuracy(torch.zeros(2, 2), target)


def test_a_mean_does_not_overflow_in_the_type_of_its_values():
    """300 in fp16 and 200 as a byte, each the mean of many; a batch of none changes nothing."""
    meter = AverageMeter("loss")
    meter.update(torch.tensor(300.0, dtype=torch.float16), 256)
    meter.update(torch.tensor(200, dtype=torch.uint8), 256)
    meter.update(torch.tensor(7.0), 0)
    assert (meter.val, meter.avg, meter.count) == (200, 250, 512)


def test_reduce_mean_is_exact_and_a_number_alone(tmp_path):
    """Of integers above 2 ** 24 too; it passes no gradient, and leaves what it is given."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        count, loss = torch.tensor([100_000_001]), torch.tensor(0.5, requires_grad=True)
        assert reduce_mean(count, 1).item() == 100_000_001 and count.dtype == torch.int64
        assert reduce_mean(torch.tensor([255], dtype=torch.uint8), 1).dtype == torch.float64
        assert reduce_mean(loss * 2, 1).item() == 1 and not reduce_mean(loss * 2, 1).requires_grad
        assert reduce_mean(loss.bfloat16(), 1).dtype == torch.float32
    finally:
        dist.destroy_process_group()
