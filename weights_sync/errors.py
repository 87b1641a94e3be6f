"""What can go wrong while a policy version travels."""

from __future__ import annotations

from broker.errors import SlipstreamError


class SyncFailed(SlipstreamError):
    """One transfer did not arrive or does not fit; the old version goes on serving."""


class LayoutRefused(SyncFailed):
    """Names, shapes or types differ from what was declared; trying again cannot help."""


class NoReceiver(SlipstreamError):
    """No generator took a version for ``weights_sync.no_generator_timeout_s``; the learner cannot go on."""
