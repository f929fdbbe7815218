"""One client that keeps so many jobs in hand: it submits another one for each that has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from bench import deployment
from omniqueue import store
from tests.process.cluster import Cluster


@dataclass
class InHand:
    """Jobs of one deployment that were accepted and have not ended."""

    cluster: Cluster
    reply_to: str = field(default_factory=store.new_id)
    #: Ids of all jobs that were ever submitted here.
    job_ids: list[str] = field(default_factory=list)

    def more(self, count: int) -> None:
        """Accept ``count`` jobs."""
        self.job_ids += [deployment.submit(self.cluster, self.reply_to) for _ in range(count)]

    def ends(self, seconds: float) -> list[float]:
        """When jobs ended within ``seconds`` (monotonic), each replaced by another one at once."""
        times: list[float] = []
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            replies = self.cluster.listener.replies(self.reply_to, 0.5)
            times += [time.monotonic()] * len(replies)
            self.more(len(replies))
        return times


def rate(times: list[float]) -> float:
    """Ends a second, from the first to the last of them: a whole number of ends in exactly their time.

    Raises ValueError when too few ended to tell.
    """
    if len(times) < 2 or times[-1] == times[0]:
        raise ValueError(f"{len(times)} jobs ended while it was measured, which is too few.")
    return (len(times) - 1) / (times[-1] - times[0])
