"""The learning rate of each step over the run, as [training] says. No state: a restart goes on where it was."""

import math

from wardround.records.training import Schedule


def rate_factor(schedule: Schedule, rounds: int, round_number: int, step: int, steps: int) -> float:
    """What the learning rate is multiplied by.

    Args:
        rounds: of the run.
        round_number: from 1.
        step, steps: of the round's phase, from 0.
    """
    gone = round_number - 1 + step / steps
    warm = 1.0
    if schedule.warmup_rounds:
        warm = min(1.0, (gone + 1 / steps) / schedule.warmup_rounds)
    if schedule.kind == "step":
        return warm * float(schedule.factor ** ((round_number - 1) // schedule.every))
    if schedule.kind == "cosine":
        rest = max(rounds - schedule.warmup_rounds, 1.0)
        share = min(max((gone - schedule.warmup_rounds) / rest, 0.0), 1.0)
        return warm * (schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * share)) / 2)
    return warm
