"""What a run reports of `--loss auto` with several teachers."""

from __future__ import annotations

from xtk.losses import parse_losses
from xtk.training.teachers import Taken, told_of_auto


def test_the_note_of_auto_states_one_weight_for_a_loss_that_teachers_share():
    ce, byte_kl, forward_kl = parse_losses(["ce:weight=0.3", "byte-kl", "forward-kl"])
    taken = [Taken(ce, None, auto=True), Taken(byte_kl, 0, auto=True), Taken(forward_kl, 1, auto=True)]
    assert list(told_of_auto(taken, ["one", "two"])) == ["ce:weight=0.3", "byte-kl, for one", "forward-kl, for two"]
    assert list(told_of_auto(taken[:2], ["one"])) == ["ce:weight=0.3 and byte-kl, for one"]
