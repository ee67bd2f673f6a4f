"""Gradients that vanish or explode are told of once, and once more when that is over."""

from __future__ import annotations

from workers.engine.watch.gradients import PATIENCE, GradientWatch


def told(watch: GradientWatch, step: int, **norms: float) -> list[tuple[str, str]]:
    return [(event["kind"], event["data"]["group"]) for event in watch.see(step, norms)]


def usual(watch: GradientWatch, steps: int = 30) -> None:
    for step in range(steps):
        noise = 1 + 0.5 * (-1) ** step
        assert told(watch, step, a=noise, b=2 * noise, c=0.5) == []


def test_an_explosion_is_told_once_and_its_end_once() -> None:
    watch = GradientWatch("abc")
    usual(watch)
    found = [told(watch, step, a=200.0, b=1.0, c=0.5) for step in range(6)]
    assert found == [[]] * (PATIENCE - 1) + [[("gradients.exploding", "a")]] + [[]] * (6 - PATIENCE)
    # Between the two limits nothing changes, however long.
    assert not any(told(watch, step, a=10.0, b=1.0, c=0.5) for step in range(20))
    found = [told(watch, step, a=1.0, b=1.0, c=0.5) for step in range(6)]
    assert found == [[]] * (PATIENCE - 1) + [[("gradients.recovered", "a")]] + [[]] * (6 - PATIENCE)


def test_one_large_norm_is_no_explosion() -> None:
    watch = GradientWatch("abc")
    usual(watch)
    assert told(watch, 1, a=500.0, b=1.0, c=0.5) == []
    assert not any(told(watch, step, a=1.0, b=1.0, c=0.5) for step in range(5))


def test_a_group_may_vanish_from_the_first_step_on() -> None:
    watch = GradientWatch("abc")
    found = [told(watch, step, a=1e-6, b=1.0, c=0.5) for step in range(4)]
    assert found == [[], [], [("gradients.vanishing", "a")], []]
    assert not any(told(watch, step, a=3e-4, b=1.0, c=0.5) for step in range(10))
    assert [told(watch, step, a=0.1, b=1.0, c=0.5) for step in range(3)][-1] == [("gradients.recovered", "a")]


def test_a_norm_of_nothing_vanishes() -> None:
    watch = GradientWatch("abc")
    assert [told(watch, step, a=0.0, b=1.0, c=0.5) for step in range(3)][-1] == [("gradients.vanishing", "a")]
