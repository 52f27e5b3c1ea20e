"""Logs of students in an online course with a large catalog of resources.

A course has ``num_topics`` topics of ``num_steps`` steps. Each step exists in ``num_formats`` formats (video, text,
exercise, ...), and each of these is one resource. The syllabus lists them topic by topic, format by format, step by
step. In practice students take the steps of a topic in a fixed order that differs from the syllabus a little.

A student has a skill in (0, 1), a preferred format (some formats are more popular), and two open topics, the first of
which are drawn by a skewed popularity. Each event is one of:

- ``revisit`` (``revisit * 2 * (1 - skill)``): the resource of ``spacing`` events ago again (spaced repetition);
- ``switch`` (``switch``): the next step of the other open topic, which was left some events ago;
- ``next``: the next step of the topic of the last new resource;
- ``topic``: where the topic is finished, the first step of one of the three topics that have it as a prerequisite
  (with probabilities 0.6, 0.3 and 0.1). They are further ahead in the course, which ends with its last topic.

A step is skipped with probability ``skip * 2 * skill`` and taken in another than the preferred format with probability
``1 - own_format``. After each event a student drops out with probability ``dropout * 2 * (1 - skill)``.

Students enrol at uniform times in [0, 1), and events are exponential gaps with the mean ``gap`` apart. The log ends at
time 1, as logs do, in the middle of many courses.

So one event of context tells the next step of a topic; a switch needs events before the last switch, and a revisit the
event of ``spacing`` events ago.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KINDS = ("next", "topic", "switch", "revisit")
_NEXT, _TOPIC, _SWITCH, _REVISIT = range(4)
_PREREQUISITE_SHARES = (0.6, 0.3, 0.1)


@dataclass(frozen=True)
class Course:
    """A course, its students, and the seed of the log.

    Args:
        num_topics: Topics.
        num_steps: Steps of a topic.
        num_formats: Formats of a step, each a resource of the catalog.
        num_students: Students.
        max_events: Events of a student, at most.
        revisit: Mean probability of a revisit.
        spacing: After how many events a resource is revisited.
        switch: Probability of a switch to the other open topic.
        skip: Mean probability that a step is skipped.
        own_format: Probability of the preferred format.
        dropout: Mean probability of dropping out after an event.
        gap: Mean time between two events, where the log lasts from 0 to 1.
        seed: Seed of the course and of the log.
    """

    num_topics: int = 60
    num_steps: int = 12
    num_formats: int = 4
    num_students: int = 6000
    max_events: int = 64
    revisit: float = 0.15
    spacing: int = 6
    switch: float = 0.2
    skip: float = 0.05
    own_format: float = 0.9
    dropout: float = 0.01
    gap: float = 0.004
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_topics", "num_steps", "num_formats", "num_students", "spacing"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_events < 2:
            raise ValueError(f"max_events must be at least 2, got {self.max_events}")
        for name in ("revisit", "skip", "dropout"):
            if not 0 <= getattr(self, name) <= 0.5:
                raise ValueError(f"{name} must be between 0 and 0.5, got {getattr(self, name)}")

    @property
    def num_items(self) -> int:
        """Resources in the catalog."""
        return self.num_topics * self.num_formats * self.num_steps


class Log(NamedTuple):
    """The events of all students, ``[num_students, max_events]``; only the first ``lengths`` of each row are events."""

    items: NDArray[np.int64]
    times: NDArray[np.float64]
    kinds: NDArray[np.int64]
    """Indices of :data:`KINDS`; the first event of a student counts as ``topic``."""
    lengths: NDArray[np.int64]


def skewed(num_classes: int, exponent: float = 0.8) -> NDArray[np.float64]:
    """Probabilities of classes that fall with a power of their rank."""
    weights = np.arange(1, num_classes + 1) ** -exponent
    return weights / weights.sum()


def generate(course: Course) -> Log:
    """The log of ``course``: the same for the same arguments."""
    rng = np.random.default_rng(course.seed)
    topics, steps, students = course.num_topics, course.num_steps, course.num_students
    order = (np.arange(steps) + rng.uniform(0, 2.5, (topics, steps))).argsort(axis=1)  # as students take the steps
    following = np.arange(topics)[:, None] + rng.integers(1, 2 + topics // 10, (topics, 3))
    popularity = rng.permutation(skewed(topics))

    skill = rng.beta(2, 2, students)
    own_format = rng.choice(course.num_formats, students, p=skewed(course.num_formats))
    topic = rng.choice(topics, (students, 2), p=popularity)
    position = np.full((students, 2), -1)
    slot = np.zeros(students, dtype=np.int64)
    is_active = np.ones(students, dtype=bool)
    every = np.arange(students)
    shape = (students, course.max_events)
    log = Log(np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape, np.int64), np.zeros(students, np.int64))
    log.times[:] = rng.uniform(0, 1, (students, 1)) + rng.exponential(course.gap, shape).cumsum(axis=1)

    for event in range(course.max_events):
        chance = rng.random((6, students))
        is_revisit = (chance[0] < 2 * course.revisit * (1 - skill)) & (event >= course.spacing)
        is_switch = ~is_revisit & (chance[1] < course.switch) & (event > 0)
        slot = np.where(is_switch, 1 - slot, slot)
        here, at = topic[every, slot], position[every, slot]
        ahead = at + 1 + ((chance[2] < 2 * course.skip * skill) & (at >= 0))
        is_over = ahead >= steps
        choice = np.searchsorted(np.cumsum(_PREREQUISITE_SHARES[:2]), chance[3])
        here = np.where(is_over, following[here, choice], here)
        has_ended = here >= topics  # the last topic of the course is finished
        here, ahead = np.minimum(here, topics - 1), np.where(is_over, 0, ahead)
        other = (chance[5] * course.num_formats).astype(np.int64)
        formats = np.where(chance[4] < course.own_format, own_format, other)
        new_item = (here * course.num_formats + formats) * steps + order[here, ahead]

        old_item = log.items[:, event - course.spacing] if event >= course.spacing else new_item
        log.items[:, event] = np.where(is_revisit, old_item, new_item)
        log.kinds[:, event] = np.select([is_revisit, is_switch, ahead == 0], [_REVISIT, _SWITCH, _TOPIC], default=_NEXT)
        topic[every, slot] = np.where(is_revisit, topic[every, slot], here)
        position[every, slot] = np.where(is_revisit, at, ahead)
        is_active &= (is_revisit | ~has_ended) & (log.times[:, event] < 1)
        log.lengths[:] += is_active
        is_active &= rng.random(students) >= 2 * course.dropout * (1 - skill)
    return log
