"""Results from their JSON."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_fakes import GivenPages, answering
from text_fakes import TextPrompts

from mmserve.errors import DocumentError
from mmserve.pipelines.from_dict import from_dict, result_type
from mmserve.pipelines.tasks import TASKS, TaskName
from mmserve.vision.page_types import Page

PAGES = [
    Page(1, "The rent is 1,875 pounds a month.", "text_layer", notes=("T.",), markdown="The rent."),
    Page(2, is_blank=True),
    Page(3, problem=DocumentError("corrupt_document", "page 3 is damaged.")),
]
ANSWERS = {"extract": '{"rent": "1,875 pounds", "tenant": null}'}
OPTIONS: dict[str, dict[str, Any]] = {"ask": {"question": "What is the rent?"}, "extract": {"fields": "rent,tenant"}}


@pytest.mark.parametrize("task", list(TASKS))
def test_each_tasks_result_is_itself_again(task: TaskName) -> None:
    engine = answering(ANSWERS.get(task, "The rent is 1,875 pounds a month."))
    result = asyncio.run(
        TASKS[task].run(
            Path("lease.pdf"),
            engine=engine,
            prompts=TextPrompts(engine.tokenizer),
            reader=GivenPages(PAGES),
            options=TASKS[task].options(OPTIONS.get(task, {})),
        )
    )
    sent = {**json.loads(json.dumps(result.to_dict())), "cached": True, "new_key": [1]}
    again = from_dict(result_type(task), sent)
    assert again.to_dict() == result.to_dict()
    assert again.to_markdown() == result.to_markdown()
    assert again.pages[2].problem is not None
    assert again.pages[2].problem.code == "corrupt_document"


def test_what_is_no_result_is_said() -> None:
    with pytest.raises(ValueError, match="no Transcript"):
        from_dict(result_type("transcribe"), {"text": "x"})
    with pytest.raises(ValueError, match="no Summary"):
        from_dict(result_type("summarize"), {"citations": 3})
