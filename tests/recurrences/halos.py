"""Kim et al. 2025, algorithm 1 and the authors' code: servers of regions and of all.

Workers' speeds fall evenly, in 1024ths; the clock is the first one's local step.
Nothing takes time on its way, so that a worker whose update completes an exchange
starts from the model after it.
"""

from recurrences import PERIOD, START
from recurrences.async_diloco import Server, arrivals

SETTINGS = [
    {
        "period": 1,
        "regions": 3,
        "updates": 3,
        "outer_lr": 0.5,
        "outer_momentum": 0.9,
        "global_lr": 0.6,
        "global_momentum": 0.3,
        "global_share": 0.6,
    },
    {"period": PERIOD, "updates": 2},
    {"period": 3, "slowest": 0.3, "regions": 1, "updates": 2, "global_share": 1.0},
    {"period": 2, "slowest": 0.25, "global_momentum": 0.0, "global_share": 0.5},
]


def recurrence(
    workers,
    period,
    regions=2,
    outer_lr=0.7,
    outer_momentum=0.4,
    global_lr=0.5,
    global_momentum=0.5,
    global_share=0.25,
    updates=4,
    slowest=0.5,
):
    region_of_worker = [i * regions // workers for i in range(workers)]
    near = []
    for region in range(regions):
        buffer = max(region_of_worker.count(region), 1)
        near.append(Server(START, outer_lr, outer_momentum, buffer, early=0))
    merged = [START] * regions
    arrived = [0] * regions
    far = Server(START, global_lr, global_momentum, len({*region_of_worker}), early=0)
    start = [START] * workers
    for _, theta, ended in arrivals(workers, period, slowest):
        for i in ended:
            r = region_of_worker[i]
            near[r].push(start[i] - theta[i])
            arrived[r] += 1
            if arrived[r] % updates == 0:
                far.push(merged[r] - near[r].theta)
                near[r].theta += global_share * (far.theta - near[r].theta)
                merged[r] = near[r].theta
            theta[i] = start[i] = near[r].theta
        yield far.theta, theta
