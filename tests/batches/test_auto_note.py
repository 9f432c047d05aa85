"""The note that a run prints about `--loss auto` with several teachers."""

from __future__ import annotations

from xtk.batches.losses_per_teacher import AssignedLoss, describe_auto_losses
from xtk.losses.spec import parse_losses


def test_auto_loss_note_states_the_weight_of_a_shared_loss_once():
    ce, byte_kl, forward_kl = parse_losses(["ce:weight=0.3", "byte-kl", "forward-kl"])
    assigned = [
        AssignedLoss(ce, None, is_auto=True),
        AssignedLoss(byte_kl, 0, is_auto=True),
        AssignedLoss(forward_kl, 1, is_auto=True),
    ]
    assert list(describe_auto_losses(assigned, ["one", "two"])) == [
        "ce:weight=0.3",
        "byte-kl, because one",
        "forward-kl, because two",
    ]
    assert list(describe_auto_losses(assigned[:2], ["one"])) == ["ce:weight=0.3 and byte-kl, because one"]
