"""Follows grammars for the engine: `python -m loramux.engine.constraints.grammar_process MODEL_DIR VOCAB_SIZE EOS...`.

The process loads the vocabulary once, and forks for each tenant with grammars. Standard input is a socket, and each
message on it carries the socket of a new fork. The process exits when the engine closes its end, and so do the forks.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from loramux.adapter_store.sandbox.confinement import ESSENTIAL, REQUIRED, confine, limit_resources
from loramux.adapter_store.sandbox.fork_server import lower_priority
from loramux.engine.constraints.grammar_messages import EXIT_UNUSABLE, LENGTH, Follow, Followed, Forget, frame
from loramux.engine.constraints.limits import COMPILE_CPU_S, STACK_BYTES, TOKEN_CPU_S, parser_limits
from loramux.engine.constraints.problems import problem_of
from loramux.engine.constraints.vocabulary import VocabularyNotUsable, load_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MEMORY_BYTES = 1 << 30
"""Limit on the additional memory of a fork, in bytes."""

MAX_COMPILED = 32
"""Maximum number of compiled grammars that a fork keeps for later sequences, as many as the gateway has checked."""

MAX_FORCED = 15
"""Maximum number of forced tokens that a fork follows at once."""

AHEAD_CPU_S = 1e-3
"""Processor time after which a fork begins to follow no further forced token, in seconds."""

NICENESS = 10
"""Niceness of a fork, so that the engine and the gateway get the CPU first."""


class Follower:
    """Follows the grammars of one tenant's sequences. It looks ahead for about `ahead_cpu_s` after each message."""

    def __init__(self, vocabulary: LLTokenizer, ahead_cpu_s: float = AHEAD_CPU_S) -> None:
        self._vocabulary = vocabulary
        self._ahead_cpu_s = ahead_cpu_s
        self._end_token_ids = frozenset(vocabulary.eos_tokens)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._matchers: dict[int, LLMatcher] = {}

    def follow(self, message: Follow) -> Followed:
        """Raises KeyError if the sequence is unknown."""
        started_s, compile_s = time.process_time(), None
        limit_s = TOKEN_CPU_S * max(1, len(message.tokens))
        if message.grammar is not None:
            limit_s += COMPILE_CPU_S
        # The library cannot be interrupted, so the kernel kills this process when the time is over.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        if message.grammar is not None:
            compile_s = self._begin(message.number, message.grammar)
        matcher = self._matchers[message.number]
        if message.tokens:
            matcher.consume_tokens(list(message.tokens))
        mask = _mask_of(matcher)
        forced: list[int] = []
        if message.looks_ahead:
            # One limit for all forced tokens. A fork that is killed here is replaced by one that does not look ahead.
            signal.setitimer(signal.ITIMER_PROF, TOKEN_CPU_S)
            mask = self._look_ahead(matcher, mask, forced)
        signal.setitimer(signal.ITIMER_PROF, 0)
        failure = problem_of(matcher) if matcher.is_error() else None
        cpu_s = time.process_time() - started_s
        return Followed(message.number, tuple(forced), None if failure else mask, failure, cpu_s, compile_s)

    def _look_ahead(self, matcher: LLMatcher, mask: bytes | None, forced: list[int]) -> bytes | None:
        """Follow the tokens that can only come next, and add them to `forced`. Returns the mask after them."""
        end_s = time.process_time() + self._ahead_cpu_s
        while (
            len(forced) < MAX_FORCED
            and time.process_time() < end_s
            and (token := self._forced_by(mask)) is not None
            and not matcher.is_error()
        ):
            matcher.consume_token(token)
            forced.append(token)
            mask = _mask_of(matcher)
        return mask

    def _forced_by(self, mask: bytes | None) -> int | None:
        """The only token that a mask allows. None if it allows several, or the end of the answer.

        A sequence can have end tokens that the grammar does not know.
        """
        bits = int.from_bytes(mask or b"", "little")
        token = bits.bit_length() - 1
        return token if bits.bit_count() == 1 and token not in self._end_token_ids else None

    def forget(self, number: int) -> None:
        self._matchers.pop(number, None)

    def _begin(self, number: int, grammar: str) -> float | None:
        from llguidance import LLMatcher

        started_s, compile_s = time.perf_counter(), None
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = LLMatcher(self._vocabulary, grammar, log_level=0, limits=parser_limits())
            if not compiled.is_error():
                # Compute the first mask's lexer states here, because all copies share them.
                compiled.compute_bitmask()
            compile_s = time.perf_counter() - started_s
        self._compiled[grammar] = compiled
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        self._matchers[number] = compiled.deep_copy()
        return compile_s


def _mask_of(matcher: LLMatcher) -> bytes | None:
    """The mask after the matcher's tokens, or None if only the end can follow."""
    return None if matcher.is_stopped() else matcher.compute_bitmask()


def serve(vocabulary: LLTokenizer, ahead_cpu_s: float = AHEAD_CPU_S, required: Collection[str] = ()) -> None:
    """Fork for each socket received on standard input, until the engine closes its end."""
    link = socket.socket(fileno=os.dup(0))
    # Otherwise, the socket would stay open in the forks, and the engine would not notice that this process has ended.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    # The kernel reaps the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Otherwise a garbage collection in a fork would copy the memory pages of all existing objects.
    gc.freeze()
    while True:
        message, files, _, _ = socket.recv_fds(link, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            link.close()
            _limit(required)
            with open(files[0], "rb", closefd=False) as received, open(files[0], "wb", closefd=False) as sent:
                _serve_tenant(received, sent, Follower(vocabulary, ahead_cpu_s))
            os._exit(0)
        os.close(files[0])


def _serve_tenant(received: IO[bytes], sent: IO[bytes], follower: Follower) -> None:
    decoder, encoder = msgspec.msgpack.Decoder(Follow | Forget), msgspec.msgpack.Encoder()

    def send(answer: Followed) -> None:
        sent.write(frame(encoder.encode(answer)))
        sent.flush()

    try:
        # Tell the engine that this fork has begun.
        send(Followed(number=-1))
        while length := received.read(LENGTH.size):
            message = decoder.decode(received.read(LENGTH.unpack(length)[0]))
            if isinstance(message, Forget):
                follower.forget(message.number)
            else:
                send(follower.follow(message))
    except OSError:
        # The engine has closed its end.
        os._exit(0)


def _limit(required: Collection[str]) -> None:
    """Limit this fork's memory and priority, and confine it. The time of each message is limited in `follow`."""
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit_resources(used_bytes + MEMORY_BYTES, 0, resource.RLIM_INFINITY)
    most_bytes = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack_bytes = STACK_BYTES if most_bytes == resource.RLIM_INFINITY else min(most_bytes, STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, stack_bytes))
    os.setsid()
    lower_priority(NICENESS)
    confine((), required)


def main() -> int:
    required = ESSENTIAL if REQUIRED in sys.argv else ()
    model_dir, vocab_size, *eos_token_ids = (one for one in sys.argv[1:] if one != REQUIRED)
    try:
        vocabulary = load_vocabulary(Path(model_dir), int(vocab_size), [int(one) for one in eos_token_ids])
    except VocabularyNotUsable as error:
        print(error, file=sys.stderr)
        return EXIT_UNUSABLE
    serve(vocabulary, required=required)
    return 0


if __name__ == "__main__":
    sys.exit(main())
