"""Streaming: the tokens of each prompt go to a streamer of the library as they are chosen."""

from collections.abc import Sequence
from typing import Any

import torch


class Streams:
    """The streamers of a call, one per prompt.

    Args:
        streamers: [prompts] a streamer of the library, such as `TextIteratorStreamer`, or None for
            a prompt that is not streamed.
    """

    def __init__(self, streamers: Sequence[Any]) -> None:
        self._streamers = list(streamers)

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_: object) -> None:
        """End the streams that are still open, so that no reader waits for ever."""
        for number in range(len(self._streamers)):
            self.end(number)

    def put_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Put the tokens from which each output continues, as the library does."""
        for streamer, prompt in zip(self._streamers, prompts, strict=True):
            if streamer is not None:
                streamer.put(torch.tensor([list(prompt)]))

    def put(self, number: int, token: int) -> None:
        """Put the next token of a prompt."""
        streamer = self._streamers[number]
        if streamer is not None:
            streamer.put(torch.tensor([token]))

    def end(self, number: int) -> None:
        """End the stream of a prompt, if it is open."""
        streamer, self._streamers[number] = self._streamers[number], None
        if streamer is not None:
            streamer.end()
