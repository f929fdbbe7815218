"""Finished media: encoded by the last stage's worker, stored under names we make, opened again by the router.

The only module that opens a media URL. Storage is fsspec's: a local folder by default, S3 and others by URL.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import io
import re
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, cast

import fsspec

from omniqueue import audio, errors, video
from omniqueue.payloads import Tensor

#: Picture formats, by the name clients use; quality 100 for webp means lossless.
IMAGE_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
CONTENT_TYPES = {
    **IMAGE_TYPES,
    **audio.TYPES,
    **video.TYPES,
    "txt": "text/plain; charset=utf-8",
    "json": "application/json",
}
#: The only names that are ever opened: made by us, with no path in them.
_NAME = re.compile(r"[0-9a-f]{32}-[0-9]{1,6}-[0-9]{1,4}\.[a-z0-9]{2,5}")


def file_name(job_id: str, attempt: int, index: int, extension: str) -> str:
    """The name of item ``index`` of a job's result; the attempt keeps a superseded worker from replacing it."""
    return f"{job_id}-{attempt}-{index}.{extension}"


def job_of(name: str) -> str:
    """The job id inside a media file's name. Raises NotFound for a name that is not one of ours."""
    if not _NAME.fullmatch(name):
        raise errors.NotFound(f"There is no file {name[:100]!r}.")
    return name[:32]


def encode_image(image: Tensor, output_format: str, compression: int = 100) -> bytes:
    """Encode a uint8 picture of shape (height, width, 3). ``compression`` is jpeg's and webp's quality, 0 to 100."""
    from PIL import Image

    if image.dtype != "uint8" or len(image.shape) != 3 or image.shape[2] not in (3, 4) or not image.nbytes:
        raise errors.EngineError(f"The engine's picture is {image.dtype} {image.shape}, not uint8 of 3 or 4 channels.")
    height, width, channels = image.shape
    mode = "RGB" if channels == 3 else "RGBA"
    picture = Image.frombuffer(mode, (width, height), image.buffer, "raw", mode, 0, 1)
    file = io.BytesIO()
    if output_format == "png":
        picture.save(file, "PNG")
    elif output_format == "jpeg":
        picture.convert("RGB").save(file, "JPEG", quality=max(1, compression))
    else:
        picture.save(file, "WEBP", quality=compression, lossless=compression == 100)
    return file.getvalue()


class MediaStore:
    """Files of finished jobs, under one fsspec URL."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL that nothing here can open."""
        self.url = url.rstrip("/")
        try:
            self.fs, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as exc:
            raise errors.ConfigError(f"OMNIQUEUE_MEDIA_FS_URL={url!r} cannot be opened: {exc}.") from exc

    def _path(self, name: str) -> str:
        job_of(name)
        return f"{self._root}/{name}"

    def write(self, name: str, content: bytes) -> None:
        """Store a file. Raises NoRoom when the disk is full, OmniqueueError when the place cannot be written."""
        path = self._path(name)
        try:
            self.fs.makedirs(self._root, exist_ok=True)
            with self.fs.open(path + ".part", "wb") as file:
                file.write(content)
            self.fs.mv(path + ".part", path)
        except OSError as exc:
            with contextlib.suppress(OSError):
                self.fs.rm(path + ".part")
            full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
            kind = errors.NoRoom if full else errors.OmniqueueError
            raise kind(f"Could not store {name} under {self.url}: {exc}.") from exc

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. Raises NotFound."""
        try:
            return cast(BinaryIO, self.fs.open(self._path(name), "rb"))
        except FileNotFoundError:
            raise errors.NotFound(f"There is no file {name!r}; files go with their job's time to live.") from None

    def read(self, name: str) -> bytes:
        """The whole file. Raises NotFound."""
        with self.open(name) as file:
            return file.read()

    def remove(self, result: Mapping[str, Any] | None) -> None:
        """Remove the files of a job's result; those already gone are fine."""
        for entry in (result or {}).get("data", ()):
            if "file" in entry:
                with contextlib.suppress(FileNotFoundError):
                    self.fs.rm(self._path(entry["file"]))

    def remove_attempts(self, job_id: str, attempts: Iterable[int]) -> None:
        """Remove whatever these attempts of a job's last stage stored, files that a kill cut short included."""
        for attempt in attempts:
            for path in self.fs.glob(f"{glob.escape(self._root)}/{job_id}-{attempt}-*"):
                with contextlib.suppress(FileNotFoundError):
                    self.fs.rm(path)


@functools.cache
def shared(url: str) -> MediaStore:
    """One media store per process and URL."""
    return MediaStore(url)
