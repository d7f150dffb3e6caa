"""The error tree: codes, statuses, and the way through pickle to another process."""

import copy
import pickle
from typing import get_args

import pytest

from mmserve.errors import HTTP_STATUS, DocumentError, EngineError, ErrorCode, MMServeError, RequestError, SetupError

KINDS = [MMServeError, RequestError, DocumentError, EngineError, SetupError]


def test_every_code_has_a_status_and_no_status_lacks_a_code() -> None:
    assert set(HTTP_STATUS) == set(get_args(ErrorCode))
    assert all(400 <= status < 600 for status in HTTP_STATUS.values())


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_request", 400),
        ("context_length_exceeded", 400),
        ("model_not_found", 404),
        ("body_stalled", 408),
        ("body_too_large", 413),
        ("page_too_large", 413),
        ("too_many_pages", 413),
        ("unsupported_type", 415),
        ("corrupt_document", 422),
        ("empty_document", 422),
        ("password_required", 422),
        ("queue_full", 429),
        ("engine_dead", 503),
        ("timeout", 504),
    ],
)
def test_statuses_that_clients_rely_on(code: ErrorCode, status: int) -> None:
    assert MMServeError(code, "why").http_status == status


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        HTTP_STATUS["queue_full"] = 200  # type: ignore[index]


@pytest.mark.parametrize("kind", KINDS)
def test_pickling_keeps_everything(kind: type[MMServeError]) -> None:
    error = kind("queue_full", "try again later", param="n")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert (twin.code, twin.message, twin.param, str(twin)) == ("queue_full", "try again later", "n", str(error))
        assert twin.http_status == 429


def test_text_is_the_sentence_alone() -> None:
    error = RequestError("invalid_request", "say it otherwise")
    assert str(error) == "say it otherwise"
    assert error.param is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_sentence_says_once_what_it_is_about(kind: type[MMServeError]) -> None:
    error = kind("timeout", "reading it took too long", param="file").about("page 2 of a.pdf")
    for named in (error, error.about("a.pdf")):
        assert type(named) is kind
        assert (named.code, named.message, named.param) == (
            "timeout",
            "page 2 of a.pdf: reading it took too long",
            "file",
        )


def test_a_document_error_is_a_request_error_and_setup_is_not() -> None:
    assert issubclass(DocumentError, RequestError)
    assert not issubclass(SetupError, RequestError)
    assert not issubclass(EngineError, RequestError)
