"""What more replicas of the slowest stage bring: a pipeline whose stages sleep, its second one the longest."""

from __future__ import annotations

from bench import deployment
from bench.in_hand import InHand, rate
from tests.process.cluster import running

COUNTS = (1, 2, 8)
#: What the stages sleep, in seconds; the slowest one takes a request at a time.
FAST_S, SLOW_S = 0.02, 0.1


def per_s(seconds: float) -> dict[int, float]:
    """Requests a second by number of replicas, each measured for ``seconds``."""
    config = deployment.stages({"delay_s": FAST_S}, {"delay_s": SLOW_S}, slots=(deployment.SLOTS, 1))
    found = {}
    with running(config) as cluster:
        cluster.loglevel = "WARNING"
        jobs = InHand(cluster)
        jobs.more(6 * max(COUNTS))
        for count in COUNTS:
            cluster.workers(1, count)
            jobs.ends(1.0)  # until the new replicas have their share
            found[count] = rate(jobs.ends(seconds))
    return found
