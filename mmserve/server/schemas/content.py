"""Parts of a message: text, and pictures and documents in all the forms that OpenAI's clients send them."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from mmserve.errors import RequestError

Detail = Literal["low", "high", "auto"]
MediaKind = Literal["image", "file"]


@dataclass(frozen=True)
class MediaPart:
    """A picture or a document that is still to be read: `source` is a URL, a data URL, base64 alone, or with `is_id`
    the name of a stored file.

    `where` is its place in the request, for errors.
    """

    where: str
    kind: MediaKind
    source: str
    name: str | None = None
    detail: Detail = "auto"
    is_id: bool = False


Part = dict[str, str] | MediaPart


class ImageUrl(BaseModel):
    url: str
    detail: Detail | None = None


class FileContent(BaseModel):
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None


class ContentPart(BaseModel):
    """`text`, `image_url` and `file` as in chat; `input_text`, `input_image` and `input_file` as in responses."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    detail: Detail | None = None
    file: FileContent | None = None
    filename: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None

    def read(self, where: str) -> Part:
        """The part as chat templates know it, or what has to be read first. Raises `RequestError`."""
        match self.type:
            case "text" | "input_text":
                if self.text is None:
                    raise _refused(where, f"is of type {self.type} and has no text.")
                return {"type": "text", "text": self.text}
            case "image_url" | "input_image":
                return self._image(where)
            case "file" | "input_file":
                return self._file(where)
        raise _refused(where, f"is of type {self.type!r}: parts of type text, image_url and file can be read.")

    def _image(self, where: str) -> MediaPart:
        if self.image_url is None:
            raise _refused(where, f"is of type {self.type} and has no image_url: send a data URL.")
        given = self.image_url if isinstance(self.image_url, ImageUrl) else ImageUrl(url=self.image_url)
        if ":" not in given.url[:16]:
            raise _refused(where, "has an image_url that is no URL: write data:image/png;base64,... with the picture.")
        return MediaPart(where, "image", given.url, detail=given.detail or self.detail or "auto")

    def _file(self, where: str) -> MediaPart:
        given = self.file or FileContent(filename=self.filename, file_data=self.file_data, file_id=self.file_id)
        source = given.file_data or (None if self.file is not None else self.file_url)
        if source is None and given.file_id is not None:
            return MediaPart(where, "file", given.file_id, given.filename, self.detail or "auto", is_id=True)
        if source is None:
            raise _refused(where, f"is of type {self.type} and has no file_data and no file_id: send it in base64.")
        return MediaPart(where, "file", source, given.filename, self.detail or "auto")


def _refused(where: str, what: str) -> RequestError:
    return RequestError("invalid_request", f"{where} {what}", param=where)
