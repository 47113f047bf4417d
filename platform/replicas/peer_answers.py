"""Checks what another server reports about this server's sequences, because tenants pay for it."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping

from loramux.engine.protocol.messages import Finished, FromEngine, SequenceOutput, Stats, StepOutput
from loramux.platform.engine_link.sequence_stream import SequenceStream
from loramux.platform.replicas.frame_link import FrameRefused

MAX_TOKEN_ID = (1 << 31) - 1

MAX_STATE_SIZE = 1 << 16
"""Largest size of a hidden state that is believed."""

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


def check_answer(message: FromEngine, streams: Mapping[str, SequenceStream]) -> None:
    """Raise FrameRefused if no engine sends this message about the unfinished sequences in `streams`.

    Nothing that a tenant can choose makes an engine's message fail, because a failure ends the connection.
    """
    match message:
        case StepOutput(outputs=outputs):
            # A step can send the scores of a sequence's last prompt tokens, and then its first token.
            tokens, scores = [one for one in outputs if one.token_ids], [one for one in outputs if one.prompt_logprobs]
            for some in (tokens, scores, [one for one in outputs if one.pooled]):
                if len({output.sequence_id for output in some}) < len(some):
                    raise FrameRefused("it sent two outputs of a sequence in one message")
            for output in outputs:
                _check_output(output, _stream(output.sequence_id, streams))
        case Finished():
            _check_end(message, _stream(message.sequence_id, streams))
        case Stats(adapters=adapters):
            if not all(_DIGEST.fullmatch(one.digest) for one in adapters):
                raise FrameRefused("it sent statistics with a malformed digest")
        case _:
            pass


def _stream(sequence_id: str, streams: Mapping[str, SequenceStream]) -> SequenceStream:
    stream = streams.get(sequence_id)
    if stream is None:
        raise FrameRefused("it sent output of a sequence that it does not run for this server")
    return stream


def _check_output(output: SequenceOutput, stream: SequenceStream) -> None:
    num_tokens = len(output.token_ids)
    if stream.num_received + num_tokens > stream.max_tokens:
        raise FrameRefused("it sent more tokens than the sequence may have")
    if num_tokens and not 0 <= min(output.token_ids) <= max(output.token_ids) <= MAX_TOKEN_ID:
        raise FrameRefused("it sent a number that is no token")
    if output.logprobs and tuple(one.token_id for one in output.logprobs) != output.token_ids:
        raise FrameRefused("it sent log-probabilities of other tokens")
    if stream.num_scored + len(output.prompt_logprobs) > len(stream.add.prompt):
        raise FrameRefused("it sent log-probabilities of more tokens than the prompt has")
    if not 0 <= output.cached_tokens <= len(stream.add.prompt):
        raise FrameRefused("it counted other tokens than the prompt has")
    if output.pooled and (stream.add.pooling is None or stream.has_state):
        raise FrameRefused("it sent a pooled state that was not asked for")
    if output.pooled and not is_state(output.pooled):
        raise FrameRefused("it sent a pooled state that is no vector of finite numbers")
    num_labels = stream.add.num_labels
    if output.pooled and num_labels is not None and len(output.pooled) != 4 * num_labels:
        raise FrameRefused("it sent logits of other classes than the adapter has")


def _check_end(end: Finished, stream: SequenceStream) -> None:
    # All committed tokens are sent before the end, except for a token that ends the sequence. An aborted or failed
    # sequence can be billed for fewer tokens.
    least = stream.num_received if end.reason in ("stop", "length") else 0
    most = stream.num_received + (end.reason != "length")
    if not least <= end.completion_tokens <= min(most, stream.max_tokens):
        raise FrameRefused("it counted other tokens than it sent")
    if end.reason == "stop" and stream.add.pooling is not None and not stream.has_state:
        raise FrameRefused("it ended a pooled prompt without its state")
    if end.prompt_tokens not in (0, len(stream.add.prompt)) or not 0 <= end.cached_tokens <= end.prompt_tokens:
        raise FrameRefused("it counted other tokens than the prompt has")
    if not 0 <= end.accepted_prediction_tokens <= end.completion_tokens or end.rejected_prediction_tokens < 0:
        raise FrameRefused("it counted other tokens of the prediction than there can be")
    if end.stop_token_id is not None and not 0 <= end.stop_token_id <= MAX_TOKEN_ID:
        raise FrameRefused("it sent a number that is no token")
    if end.stop_logprobs is not None and end.stop_logprobs.token_id != end.stop_token_id:
        raise FrameRefused("it sent log-probabilities of other tokens")


def is_state(pooled: bytes) -> bool:
    """True if this is a pooled hidden state: finite numbers in little-endian float32."""
    count, rest = divmod(len(pooled), 4)
    return not rest and count <= MAX_STATE_SIZE and all(map(math.isfinite, struct.unpack(f"<{count}f", pooled)))
