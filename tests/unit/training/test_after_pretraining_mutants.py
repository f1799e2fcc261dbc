"""Classic mistakes of preference, reward and distillation losses, and the test that finds each.

A loss that is wrong still falls, and a model that is trained with it still changes. What finds the
mistake is a law. Those here are tests of the files beside this one, run while the mistake is in
place.
"""

from functools import partial

import pytest
import test_distillation as distilled
import test_log_probs as scored
import test_policy_gradient as rewarded
import test_preference as preferred
import torch
import torch.nn.functional as F
from mutants import Laws, Mutant, killers

from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training import distillation, policy_gradient, preference
from lm_from_scratch.training.distillation import distributions
from lm_from_scratch.training.log_probs import token_log_probs

LAWS: Laws = {
    "log-probabilities by the definition": scored.test_each_is_the_logarithm_of_a_share,
    "prompts count nothing": scored.test_prompts_and_padding_count_nothing,
    "all answers": scored.test_the_answers_that_a_model_can_give_have_a_probability_of_one,
    "ln 2 at first": partial(preferred.test_a_model_that_is_its_reference_tosses_a_coin, 0.1),
    "a pair by hand": preferred.test_a_pair_by_hand,
    "judgements": partial(preferred.test_the_loss_is_the_surprise_at_the_judgement, 2.0, 0.1),
    "a fixed reference": preferred.test_no_gradient_reaches_the_reference,
    "large margins": preferred.test_large_margins_are_finite,
    "the expected reward": partial(rewarded.test_reinforce_follows_the_expected_reward, -1.3),
    "no bias": rewarded.test_leaving_one_out_has_no_bias,
    "half as far": rewarded.test_centred_groups_of_two_go_half_as_far,
    "advantages by hand": rewarded.test_advantages_by_hand,
    "equal rewards": partial(rewarded.test_a_group_of_equal_rewards_teaches_nothing, True),
    "level and unit": rewarded.test_advantages_know_neither_level_nor_unit,
    "token by token": partial(rewarded.test_grpo_token_by_token, (0.1, 0.4), 0.3, "means"),
    "two tokens by hand": rewarded.test_two_tokens_by_hand,
    "what still pulls": partial(
        rewarded.test_only_what_has_gone_far_enough_is_clipped, 1.5, -1, True
    ),
    "fixed numbers": rewarded.test_no_gradient_reaches_what_is_fixed,
    "both divergences": rewarded.test_the_estimate_of_the_divergence,
    "weights of tokens": rewarded.test_a_long_answer_weighs_as_the_average_says,
    "divergences by the definition": partial(
        distilled.test_both_divergences_by_the_definition, 3.0
    ),
    "warm gradients": partial(distilled.test_the_gradient_of_a_warm_teacher_does_not_shrink, 4.0),
    "a fixed teacher": partial(distilled.test_no_gradient_reaches_the_teacher, "forward_kl"),
    "excluded tokens": partial(distilled.test_what_both_exclude_costs_nothing, "forward_kl"),
    "what counts": distilled.test_the_mixture_counts_what_has_a_target,
}

# ------------------------------------------------------------------- the code as it is, and again

TOKENS = "training.log_probs:token_log_probs"
DPO = "training.preference:dpo_loss"
ADVANTAGES = "training.policy_gradient:group_advantages"
REINFORCE, GRPO = "training.policy_gradient:reinforce_loss", "training.policy_gradient:grpo_loss"
FORWARD = "training.distillation:forward_kl"

dpo, grpo = preference.dpo_loss, policy_gradient.grpo_loss
advantages, forward_kl = policy_gradient.group_advantages, distillation.forward_kl


def gathered(logits, targets, counts=lambda targets: targets != IGNORE):
    """Log-probabilities, given which targets count."""
    found = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(counts(targets), found, 0.0)


def pairs(loss=F.logsigmoid, fixed=torch.Tensor.detach):
    """DPO, given the logarithm of the judgement, and what becomes of the reference."""

    def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.1, label_smoothing=0.0):
        better, worse = beta * (chosen - fixed(ref_chosen)), beta * (rejected - fixed(ref_rejected))
        m, e = better - worse, label_smoothing
        losses = -(1 - e) * loss(m) - e * loss(-m) if e else -loss(m)
        return preference.Preference(losses, better.detach(), worse.detach())

    return dpo_loss


def summed(log_probs, rewards, mask, baseline=0.0, sign=-1, total=lambda x: x.sum(1)):
    """REINFORCE, given its sign, and the number that it makes of an answer."""
    advantages = (rewards - baseline).detach()
    return sign * (advantages * total(log_probs.masked_fill(~mask.bool(), 0.0))).mean()


def changed(**changes):
    """GRPO, with some of its arguments made from all of them."""

    def grpo_loss(log_probs, old_log_probs, advantages, mask, clip=(0.2, 0.2), *args, **names):
        given = dict(zip(("reference_log_probs", "kl"), args)) | names
        given |= dict(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
        given |= dict(mask=mask, clip=clip)
        return grpo(**given | {name: change(given) for name, change in changes.items()})

    return grpo_loss


def taken_away(*args, **names):
    """GRPO with the divergence subtracted, not added."""
    with_kl = grpo(*args, **names)
    without = grpo(*args[:6], **names | {"kl": 0.0})
    return with_kl._replace(loss=2 * without.loss - with_kl.loss)


def divergence(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


SAME = [
    Mutant("log-probabilities", TOKENS, gathered),
    Mutant("preferences", DPO, pairs()),
    Mutant("REINFORCE", REINFORCE, summed),
    Mutant("GRPO", GRPO, changed()),
    Mutant("advantages", ADVANTAGES, lambda r, scale=True, eps=1e-4: advantages(r, scale, eps)),
]

# ------------------------------------------------------------------------------------ mistakes

#: What is wrong, and the law that finds it.
MUTANTS = [
    (Mutant(
        "prompt tokens in the loss", TOKENS,
        partial(gathered, counts=lambda targets: targets == targets),
    ), "prompts count nothing"),
    (Mutant(
        "targets not shifted", TOKENS, lambda z, targets: token_log_probs(z, targets.roll(1, 1)),
    ), "all answers"),
    (Mutant(
        "probabilities, not logarithms", TOKENS,
        lambda z, targets: token_log_probs(z, targets).exp(),
    ), "log-probabilities by the definition"),
    (Mutant(
        "chosen and rejected swapped", DPO,
        lambda c, r, ref_c, ref_r, *how, **names: dpo(r, c, ref_r, ref_c, *how, **names),
    ), "a pair by hand"),
    (Mutant(
        "no reference", DPO,
        lambda c, r, ref_c, ref_r, *how, **names: dpo(c, r, 0 * ref_c, 0 * ref_r, *how, **names),
    ), "ln 2 at first"),
    (Mutant("the reference in the graph", DPO, pairs(fixed=lambda x: x)), "a fixed reference"),
    (Mutant("sigmoid, then log", DPO, pairs(lambda m: m.sigmoid().log())), "large margins"),
    (Mutant(
        "smoothing the wrong way", DPO,
        lambda *given: dpo(*given[:5])._replace(losses=dpo(*given[:5], 0.5 - given[5]).losses),
    ), "judgements"),
    (Mutant("the reward goes down", REINFORCE, partial(summed, sign=1)), "the expected reward"),
    (Mutant(
        "the mean over tokens", REINFORCE, partial(summed, total=lambda x: x.mean(1)),
    ), "the expected reward"),
    (Mutant(
        "a baseline that knows the answer", "training.policy_gradient:leave_one_out",
        lambda rewards: rewards.mean(dim=1, keepdim=True).expand_as(rewards),
    ), "no bias"),
    (Mutant("advantage not centred", ADVANTAGES, lambda rewards, scale: rewards), "half as far"),
    (Mutant(
        "centred over the batch", ADVANTAGES,
        lambda rewards, *how, **names: rewards - rewards.mean(),
    ), "advantages by hand"),
    (Mutant(
        "divided by a deviation of 0", ADVANTAGES,
        lambda rewards, scale: advantages(rewards, scale, eps=0.0),
    ), "equal rewards"),
    (Mutant(
        "never scaled", ADVANTAGES, lambda rewards: advantages(rewards, scale=False),
    ), "level and unit"),
    (Mutant(
        "mask shifted by one", GRPO, changed(mask=lambda given: given["mask"].roll(1, 1)),
    ), "token by token"),
    (Mutant(
        "padding in the loss", GRPO, changed(mask=lambda given: torch.ones_like(given["mask"])),
    ), "weights of tokens"),
    (Mutant(
        "old log-probabilities computed again", GRPO,
        changed(old_log_probs=lambda given: given["log_probs"].detach()),
    ), "two tokens by hand"),
    (Mutant(
        "nothing clipped above", GRPO, changed(clip=lambda given: (given["clip"][0], torch.inf)),
    ), "two tokens by hand"),
    (Mutant(
        "low and high swapped", GRPO, changed(clip=lambda given: given["clip"][::-1]),
    ), "token by token"),
    (Mutant(
        "maximum for minimum", "training.policy_gradient:torch.minimum", torch.maximum,
    ), "what still pulls"),
    (Mutant(
        "the reference in the graph of GRPO", "training.policy_gradient:difference",
        lambda log_probs, fixed, mask: (log_probs - fixed).masked_fill(~mask, 0.0),
    ), "fixed numbers"),
    (Mutant("the divergence taken away", GRPO, taken_away), "both divergences"),
    (Mutant(
        "the divergence the other way round", "training.policy_gradient:torch.expm1",
        lambda minus_gain: (-minus_gain).exp() - 1 + 2 * minus_gain,
    ), "both divergences"),
    (Mutant(
        "long answers weigh more", GRPO, changed(average=lambda given: policy_gradient.token_mean),
    ), "token by token"),
    (Mutant(
        "no square of the temperature", FORWARD,
        lambda student, teacher, tau: forward_kl(student, teacher, tau) / tau**2,
    ), "warm gradients"),
    (Mutant(
        "teacher and student swapped", FORWARD, distillation.reverse_kl,
    ), "divergences by the definition"),
    (Mutant(
        "the teacher in the graph", FORWARD,
        lambda student, teacher, tau=1.0: divergence(
            teacher.log_softmax(-1), student.log_softmax(-1)
        ),
    ), "a fixed teacher"),
    (Mutant(
        "NaN of what both exclude", FORWARD,
        lambda *given: given[-1] ** 2 * divergence(*distributions(*given)[::-1]),
    ), "excluded tokens"),
    (Mutant(
        "padding distilled", "training.distillation:distillation_loss",
        lambda student, teacher, targets, tau, share:
            share * forward_kl(student, teacher, tau).mean()
            + (1 - share) * distillation.causal_lm_loss(student, targets),
    ), "what counts"),
]  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
def test_right_code_written_again_is_right(law: str) -> None:
    assert {m.label: killers(m, {law: LAWS[law]}) for m in SAME} == {m.label: [] for m in SAME}


@pytest.mark.parametrize(("mutant", "law"), MUTANTS, ids=[m.label for m, _ in MUTANTS])
def test_the_mistake_is_found(mutant: Mutant, law: str) -> None:
    assert killers(mutant, {law: LAWS[law]}) == [law]  # by a number that is wrong, not by an error
