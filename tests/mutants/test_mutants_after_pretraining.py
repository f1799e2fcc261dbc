"""Classic mistakes of preference, reward and distillation losses.

A loss that is wrong still falls, and a model that is trained with it still changes. What finds the
mistake is a law.
"""

import pytest
from mutation import Mutant, killer, laws_in, mutants

TARGETS = "targets.flatten().long()"
LATER = ".detach())\n    rejected_rewards = beta * (rejected - "

MISTAKES = {
    "training.log_probs:token_log_probs": [
        ("prompt tokens in the loss", TARGETS, f"{TARGETS}.clamp(min=0)"),
        ("targets not shifted", TARGETS, "targets.roll(1, 1).flatten().long()"),
        ("probabilities, not logarithms", "-surprise.view_as", "(-surprise).exp().view_as"),
    ],
    "training.preference:dpo_loss": [
        ("chosen and rejected swapped",
         "chosen_rewards - rejected_rewards", "rejected_rewards - chosen_rewards"),
        ("no reference", f"reference_chosen{LATER}", f"0 * reference_chosen{LATER}0 * "),
        ("the reference in the graph", "reference_chosen.detach()", "reference_chosen"),
        ("sigmoid, then log", "-F.logsigmoid(margins)", "-margins.sigmoid().log()"),
        ("smoothing the wrong way", ", label_smoothing)", ", 1 - label_smoothing)"),
    ],
    "training.policy_gradient:reinforce_loss": [
        ("the reward goes down", "return -(advantages", "return (advantages"),
        ("the mean over tokens", "sum(dim=1)", "mean(dim=1)"),
    ],
    "training.policy_gradient:leave_one_out": [
        ("a baseline that knows the answer",
         "(rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)",
         "rewards.mean(dim=1, keepdim=True).expand_as(rewards)"),
    ],
    "training.policy_gradient:group_advantages": [
        ("advantage not centred", "rewards - rewards.mean(dim=1, keepdim=True)", "rewards"),
        ("centred over the batch", "rewards.mean(dim=1, keepdim=True)", "rewards.mean()"),
        ("divided by a deviation of 0", " + eps", ""),
        ("never scaled", "if scale else", "if False else"),
    ],
    "training.policy_gradient:grpo_loss": [
        ("mask shifted by one", "mask.bool(), ", "mask.bool().roll(1, 1), "),
        ("padding in the loss", "mask.bool(), ", "torch.ones_like(mask).bool(), "),
        ("old log-probabilities computed again", "log_probs, old_log_probs, mask)",
         "log_probs, log_probs, mask)"),
        ("nothing clipped above", "clamp(1 - low, 1 + high)", "clamp(1 - low)"),
        ("low and high swapped", "low, high = clip", "high, low = clip"),
        ("maximum for minimum", "torch.minimum", "torch.maximum"),
        ("the divergence taken away", "losses + kl", "losses - kl"),
        ("the divergence the other way round",
         "torch.expm1(-gain) + gain", "torch.expm1(gain) - gain"),
        ("long answers weigh more", "average(losses, mask)", "token_mean(losses, mask)"),
    ],
    "training.policy_gradient:difference": [
        ("the reference in the graph of GRPO", "fixed.detach()", "fixed"),
    ],
    "training.distillation:forward_kl": [
        ("no square of the temperature", "temperature**2 * ", ""),
        ("teacher and student swapped", "(log_p, log_q)", "(log_q, log_p)"),
    ],
    "training.distillation:distributions": [
        ("the teacher in the graph", "teacher.detach()", "teacher"),
    ],
    "training.distillation:kl_divergence": [
        ("NaN of what both exclude", ".masked_fill(p == 0, 0.0)", ""),
    ],
    "training.distillation:distillation_loss": [
        ("padding distilled", "targets != IGNORE", "targets == targets"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant) -> None:
    """One of those of its own file."""
    module = mutant.where.partition(":")[0].rpartition(".")[2]
    assert killer(mutant, laws_in(f"unit/training/test_{module}.py", most=6))
