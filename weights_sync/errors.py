"""What can go wrong while a policy version travels."""

from __future__ import annotations

from broker.errors import SlipstreamError

NO_ROOM = "no room"


class SyncFailed(SlipstreamError):
    """One transfer did not arrive or does not fit; the old version goes on serving."""


class LayoutRefused(SyncFailed):
    """Names, shapes or types differ from what was declared, or no version can ever fit; trying again cannot help."""


class NoRoom(SyncFailed):
    """What lies in a depot leaves no room at the moment; begins with NO_ROOM, by which rank 0 knows it of others."""


class NoReceiver(SlipstreamError):
    """No generator took a version for ``weights_sync.no_generator_timeout_s``; the learner cannot go on."""
