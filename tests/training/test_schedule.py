import math

import pytest

from seqarch.training.schedule import Cosine, Length, WarmupStableDecay

LENGTH = Length(steps=100, tokens_per_step=1000)


def factors(schedule, length=LENGTH):
    return [schedule.factor(s, length) for s in range(length.steps)]


def test_cosine_is_the_closed_form():
    expected = [(s + 1) / 10 for s in range(10)]
    expected += [0.2 + 0.8 * (1 + math.cos(math.pi * k / 90)) / 2 for k in range(90)]
    assert factors(Cosine(warmup_steps=10, min_ratio=0.2)) == pytest.approx(expected, rel=1e-12)


def test_cosine_ends_at_its_lowest_value():
    assert Cosine(warmup_steps=10, min_ratio=0.2).factor(100, LENGTH) == pytest.approx(0.2)
    assert Cosine(warmup_steps=10, min_ratio=0.2).factor(500, LENGTH) == pytest.approx(0.2)


def test_warmup_stable_decay_is_the_closed_form():
    expected = [(s + 1) / 10 for s in range(10)] + [1.0] * 70 + [0.1 + 0.9 * (20 - k) / 20 for k in range(20)]
    schedule = WarmupStableDecay(warmup_steps=10, decay_steps=20)
    assert factors(schedule) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("in_tokens", "in_steps"),
    [
        (Cosine(warmup_tokens=9_001), Cosine(warmup_steps=10)),
        (
            WarmupStableDecay(warmup_tokens=10_000, decay_tokens=29_500),
            WarmupStableDecay(warmup_steps=10, decay_steps=30),
        ),
    ],
)
def test_tokens_are_rounded_up_to_steps(in_tokens, in_steps):
    assert factors(in_tokens) == factors(in_steps)


def test_defaults_are_shares_of_training():
    # jsonargparse carries options over to another class, so the two must agree on what they share
    assert Cosine().min_ratio == WarmupStableDecay().min_ratio
    assert factors(Cosine()) == factors(Cosine(warmup_steps=2))
    assert factors(WarmupStableDecay()) == factors(WarmupStableDecay(warmup_steps=2, decay_steps=20))


@pytest.mark.parametrize("schedule", [Cosine(warmup_steps=0), WarmupStableDecay(warmup_steps=0, decay_steps=0)])
def test_without_warmup_the_first_step_has_the_peak_rate(schedule):
    assert schedule.factor(0, LENGTH) == 1.0


@pytest.mark.parametrize(
    "schedule",
    [
        Cosine(min_ratio=0.0),
        Cosine(warmup_steps=0, min_ratio=0.0),
        WarmupStableDecay(min_ratio=0.0),
        WarmupStableDecay(warmup_steps=1, decay_steps=1, min_ratio=0.0),
    ],
)
@pytest.mark.parametrize("steps", [2, 3, 100])
def test_no_step_is_spent_at_rate_zero(schedule, steps):
    assert all(0 < f <= 1 for f in factors(schedule, Length(steps, 1)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(warmup_steps=1, warmup_tokens=1), "warmup_steps or warmup_tokens, not both"),
        (lambda: WarmupStableDecay(decay_steps=1, decay_tokens=1), "decay_steps or decay_tokens, not both"),
        (lambda: Cosine(warmup_steps=-1), "warmup_steps must not be negative"),
        (lambda: Cosine(min_ratio=1.5), "min_ratio must be from 0 to 1"),
        (lambda: Cosine(warmup_steps=101).factor(0, LENGTH), "warmup takes 101 steps, but training has 100"),
        (
            lambda: WarmupStableDecay(warmup_steps=60, decay_steps=50).factor(0, LENGTH),
            r"warm-up \(60 steps\) and decay \(50\) are longer than training \(100\)",
        ),
    ],
)
def test_errors_name_the_option(make, message):
    with pytest.raises(ValueError, match=message):
        make()
