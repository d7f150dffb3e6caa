"""What has been done since the start, for whoever measures."""

from collections import Counter
from dataclasses import dataclass, field

from mmserve.jobs.records import JobStatus
from mmserve.pipelines.tasks import TaskName


@dataclass
class JobCounters:
    """Jobs by task and how they ended; `num_running` are worked on now."""

    jobs: Counter[tuple[TaskName, JobStatus]] = field(default_factory=Counter)
    num_running: int = 0
