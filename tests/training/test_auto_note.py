"""What a run reports of `--loss auto` with several teachers."""

from __future__ import annotations

from xtk.losses.loss_spec import parse_losses
from xtk.training.losses_per_teacher import AssignedLoss, describe_auto_losses


def test_the_note_of_auto_states_one_weight_for_a_loss_that_teachers_share():
    ce, byte_kl, forward_kl = parse_losses(["ce:weight=0.3", "byte-kl", "forward-kl"])
    taken = [
        AssignedLoss(ce, None, is_auto=True),
        AssignedLoss(byte_kl, 0, is_auto=True),
        AssignedLoss(forward_kl, 1, is_auto=True),
    ]
    assert list(describe_auto_losses(taken, ["one", "two"])) == [
        "ce:weight=0.3",
        "byte-kl, because one",
        "forward-kl, because two",
    ]
    assert list(describe_auto_losses(taken[:2], ["one"])) == ["ce:weight=0.3 and byte-kl, because one"]
