"""A log of impressions and clicks with a large vocabulary of item ids.

Each row is one item that was shown to one user, in the order of time. Columns after the label (1 for a click):

====  =========================================================================================
I1    price of the item
I2    position in the list, from 0
I3    how well the item matches the query, 0 to 100; missing outside of search
I4    clicks of the user so far
C1    item id: ``num_items`` ids, of which few are frequent
C2    topic of the item
C3    segment of the user
C4    surface: feed, search or email
C5    device
C6    hour of the day
====  =========================================================================================

Half of the items are drawn by their popularity, the other half from one of the three favorite topics of the segment.
Popularity falls with the inverse of the rank, of topics and of the items in a topic. A click has the probability
``0.01 + 0.98 * sigmoid(z)`` with

- in the feed, ``2 * affinity`` of the segment to the item, a product of vectors of 8 numbers, of which an item has
  most in common with its topic; in email, half of that;
- in search, a fifth of that, and ``4 * (match - 0.5)``: the surface decides which features count;
- a number for each item, one for each pair of device and hour, and a sensitivity to price of each segment;
- ``-0.3 * log(1 + position)``, and ``-0.02`` for each day.

So pairs of ids matter, of which there are far more than rows, and a linear model of the columns is not enough.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MISSING = -1
"""The value of an empty field; no other value is negative."""
_RANK = 8
_SHARES = (0.6, 0.3, 0.1)


@dataclass(frozen=True)
class ClickModel:
    """The sizes of a log and its seed.

    Args:
        num_rows: Impressions.
        num_items: Item ids, a multiple of ``num_topics``.
        num_topics: Topics of items.
        num_segments: Segments of users.
        num_days: Days, which have the same number of rows.
        seed: Seed of the log.
    """

    num_rows: int = 240_000
    num_items: int = 5_000
    num_topics: int = 50
    num_segments: int = 50
    num_days: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_items", "num_segments", "num_days"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_topics < 3 or self.num_items % self.num_topics:
            raise ValueError(
                f"num_topics must be at least 3 and divide num_items={self.num_items}, got {self.num_topics}"
            )


class ClickLog(NamedTuple):
    """Rows in the order of time; :data:`MISSING` where a field is empty."""

    labels: NDArray[np.int64]
    """``[num_rows]``, 1 for a click."""
    integers: NDArray[np.int64]
    """``[num_rows, num_integers]``."""
    categories: NDArray[np.int64]
    """``[num_rows, num_categories]``, below 2**32."""
    probabilities: NDArray[np.float64] | None = None
    """``[num_rows]``, of a click, if the log was generated: no model can know more."""


def skewed(num_classes: int) -> NDArray[np.float64]:
    """Probabilities of classes that fall with the inverse of their rank."""
    weights = 1 / np.arange(1, num_classes + 1)
    return weights / weights.sum()


def _draw(rng: np.random.Generator, shares: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    return np.searchsorted(np.cumsum(shares)[:-1], rng.random(size))


def generate(model: ClickModel) -> ClickLog:
    """The log of ``model``: the same for the same arguments."""
    rng = np.random.default_rng(model.seed)
    rows, topics, segments = model.num_rows, model.num_topics, model.num_segments
    favorites = rng.integers(0, topics, (segments, 3))
    topic_vectors = rng.normal(size=(topics, _RANK))
    items = 0.95 * topic_vectors[np.arange(model.num_items) % topics] + 0.3 * rng.normal(size=(model.num_items, _RANK))
    segment_vectors = rng.normal(size=(segments, _RANK)) / np.sqrt(_RANK)
    quality = 0.4 * rng.normal(size=model.num_items)
    prices = rng.lognormal(3, 1, model.num_items)
    sensitivity = 0.4 * rng.normal(size=segments)
    hour_effects = 0.5 * rng.normal(size=(3, 24))

    segment, hour = rng.integers(0, segments, rows), rng.integers(0, 24, rows)
    surface, device = _draw(rng, np.array(_SHARES), rows), _draw(rng, np.array(_SHARES), rows)
    favorite = favorites[segment, rng.integers(0, 3, rows)]
    topic = np.where(rng.random(rows) < 0.5, favorite, _draw(rng, skewed(topics), rows))
    item = _draw(rng, skewed(model.num_items // topics), rows) * topics + topic
    match, position = rng.beta(2, 2, rows), rng.integers(0, 20, rows)

    in_search = surface == 1
    affinity = 2 * (segment_vectors[segment] * items[item]).sum(axis=1) * np.array([1, 0.2, 0.5])[surface]
    z = affinity + np.where(in_search, 4 * (match - 0.5), 0) + quality[item] + hour_effects[device, hour]
    z += sensitivity[segment] * (np.log(prices[item]) - 3) - 0.3 * np.log1p(position)
    z -= 1.0 + 0.02 * (np.arange(rows) * model.num_days // rows)
    probabilities = 0.01 + 0.98 / (1 + np.exp(-z))
    integers = (prices[item], position, np.where(in_search, 100 * match, MISSING), rng.poisson(20, rows))
    # Ids as hashes of 32 bits: one number for each value of a column.
    categories = (np.stack((item, topic, segment, surface, device, hour), axis=1) * 2654435761 + 1) % 2**32
    return ClickLog(
        (rng.random(rows) < probabilities).astype(np.int64),
        np.stack(integers, axis=1).astype(np.int64),
        categories,
        probabilities,
    )
