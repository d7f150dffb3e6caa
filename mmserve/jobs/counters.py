"""What has been done since the start, for whoever measures."""

from collections import Counter
from dataclasses import dataclass, field

from mmserve.jobs.records import JobStatus
from mmserve.pipelines.tasks import TaskName


@dataclass
class JobCounters:
    """Jobs and documents by task and how they ended, and pages read by task.

    `num_pages_remembered` and `num_answers_replayed` were spared, because an earlier start had them; `documents_cached`
    are among `documents`. `num_running` jobs are worked on now.
    """

    jobs: Counter[tuple[TaskName, JobStatus]] = field(default_factory=Counter)
    documents: Counter[tuple[TaskName, JobStatus]] = field(default_factory=Counter)
    documents_cached: Counter[TaskName] = field(default_factory=Counter)
    pages: Counter[TaskName] = field(default_factory=Counter)
    num_pages_remembered: int = 0
    num_answers_replayed: int = 0
    num_running: int = 0
