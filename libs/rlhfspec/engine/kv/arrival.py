"""Checks of a sequence that another engine sends."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np

from rlhfspec.engine.base import Bytes, KVRange, Manifest, Request, SequenceState, Watermark
from rlhfspec.engine.kv.state_bytes import checksum_of
from rlhfspec.engine.params import is_int
from rlhfspec.engine.requests import check_types
from rlhfspec.engine.scheduling.sequences import NUM_COUNTERS, Sequence
from rlhfspec.errors import SequenceStateError

if TYPE_CHECKING:
    from rlhfspec.engine.kv.space import KVSpace
    from rlhfspec.engine.kv.state import EngineState

SCHEMA = 3  # of a manifest and the records after it
NOT_WANTED = np.iinfo(np.int32).max  # start position for KV that is not wanted
_MOST_COUNTED = 1 << 30
_MOST_STRATEGIES = 1024
_LARGEST = 1e300  # Python integers may exceed the range of floats


def check_manifest(manifest: Manifest, *, architecture: str, weights_version: int) -> None:
    check_type("manifest", manifest, Manifest)
    check_type("request", manifest.request, Request)
    check_types(manifest.request)
    _same("schema", manifest.schema, SCHEMA)
    fingerprints = manifest.fingerprints
    are_texts = isinstance(fingerprints, tuple) and all(isinstance(each, str) for each in fingerprints)
    _require("fingerprints", are_texts and len(fingerprints) in (1, 2), fingerprints, "one or two strings")
    check_type("architecture", manifest.architecture, str)
    _same("architecture", manifest.architecture, architecture)
    versions = is_int(manifest.weights_version) and 0 <= manifest.weights_version <= weights_version
    _require("weights_version", versions, manifest.weights_version, weights_version)
    _require("epoch", is_int(manifest.epoch) and manifest.epoch >= 0, manifest.epoch, "a number >= 0")
    request = manifest.request
    first, last = len(request.prompt_token_ids), len(request.prompt_token_ids) + request.params.max_tokens - 1
    fits = is_int(manifest.num_tokens) and first <= manifest.num_tokens <= last
    _require("num_tokens", fits, manifest.num_tokens, f"{first} to {last}")


def check_weights(manifest: Manifest, state: EngineState) -> None:
    _same("weights_version", manifest.weights_version, state.weights_version)
    _same("fingerprint", manifest.fingerprints[0], state.target.runner.fingerprint())


def check_range(kv: KVRange, manifest: Manifest, spaces: SequenceOf[KVSpace | None], num_tokens: int) -> None:
    """Check a KV range, which must end before `num_tokens`: the last token has to run for logits."""
    check_type("kv", kv, KVRange)
    _same("request_id", kv.request_id, manifest.request.id)
    check_watermark(kv.start, manifest.epoch, len(spaces))
    is_whole = isinstance(kv.kv, tuple) and len(kv.kv) == len(spaces)
    _require("kv", is_whole, type(kv.kv).__name__, f"one for each of {len(spaces)} KV spaces")
    for space, first, part in zip(spaces, kv.start.positions, kv.kv, strict=True):
        is_bytes = isinstance(part, np.ndarray) and part.dtype == np.uint8 and part.ndim == 2
        is_bytes = is_bytes and part.flags.c_contiguous
        _require("kv", is_bytes, type(part).__name__, "uint8 [positions, bytes per position]")
        if space is not None:
            _same("kv", part.shape[1], space.bytes_per_position)
        if len(part) or first != NOT_WANTED:
            _require("kv", first + len(part) < num_tokens, first + len(part), f"fewer positions than {num_tokens}")


def check_content(kv: KVRange) -> None:
    """Verify the checksum of a range, before any byte is written."""
    _same("checksum", kv.checksum, checksum_of(kv.kv))


def check_out(out: Bytes, needed: int) -> None:
    fits = out.dtype == np.uint8 and out.ndim == 1 and out.flags.c_contiguous and out.flags.writeable
    _require("out", fits and len(out) >= needed, (out.dtype.name, out.shape), f"{needed} writable bytes")


def check_watermark(start: Watermark, epoch: int, num_spaces: int) -> None:
    check_type("start", start, Watermark)
    _same("epoch", start.epoch, epoch)
    are_positions = isinstance(start.positions, tuple) and all(
        is_int(first) and first >= 0 for first in start.positions
    )
    _require("start", are_positions and len(start.positions) == num_spaces, start.positions, f"{num_spaces} positions")


def check_reserved(manifest: Manifest, reserved: Sequence, spaces: SequenceOf[KVSpace]) -> None:
    assert reserved.origin is not None
    _require(
        "request", reserved.origin.request == manifest.request, manifest.request.id, "reserved for another request"
    )
    for space in spaces if reserved.has_row else ():
        written = int(space.cached[reserved.row])
        _require("kv", written < manifest.num_tokens, f"{manifest.num_tokens} tokens", f"KV of {written} positions")


def check_no_gap(kv: KVRange, row: int, spaces: SequenceOf[KVSpace | None]) -> None:
    for space, first, part in zip(spaces, kv.start.positions, kv.kv, strict=True):
        if space is not None and len(part):
            _require("start", first <= space.cached[row], first, int(space.cached[row]))


def check_state(arrived: SequenceState, num_token_ids: int, stop_ids: tuple[int, ...]) -> None:
    request, tokens, num_tokens = arrived.manifest.request, arrived.token_ids, arrived.manifest.num_tokens
    prompt, response = len(request.prompt_token_ids), num_tokens - len(request.prompt_token_ids)
    _array("token_ids", tokens, np.int32, num_tokens)
    same_prompt = tuple(tokens[:prompt].tolist()) == request.prompt_token_ids
    _require("token_ids", same_prompt, "another prompt", "the request's")
    in_vocabulary = tokens.min() >= 0 and tokens.max() < num_token_ids
    _require("token_ids", in_vocabulary, [int(tokens.min()), int(tokens.max())], f"[0, {num_token_ids})")
    _require("token_ids", not np.isin(tokens[prompt:], stop_ids).any(), "a stop token", "none before the end")
    _array("log_probs", arrived.log_probs, np.float32, response)
    _array("tempered_log_probs", arrived.tempered_log_probs, np.float32, response)
    for name, values in (("log_probs", arrived.log_probs), ("tempered_log_probs", arrived.tempered_log_probs)):
        _require(name, np.isfinite(values).all(), "NaN or infinity", "numbers")
    versions = arrived.weights_versions
    _array("weights_versions", versions, np.int32, response)
    newest = arrived.manifest.weights_version
    known = not response or (versions[0] >= 0 and versions[-1] <= newest and (np.diff(versions) >= 0).all())
    _require("weights_versions", known, "an unknown version, or a decreasing one", f"0 to {newest}, never falling")
    counters = arrived.counters
    are_counts = _is_tuple(counters, NUM_COUNTERS) and all(map(_is_count, counters))
    _require("counters", are_counts, counters, f"{NUM_COUNTERS} numbers")
    strategies = arrived.strategies
    are_named = _is_tuple(strategies) and len(strategies) <= _MOST_STRATEGIES
    are_named = are_named and all(_is_tuple(s, 2) and isinstance(s[0], str) and _is_count(s[1]) for s in strategies)
    _require("strategies", are_named, strategies, "names and counts")
    learnt = arrived.acceptance
    sane = (
        _is_tuple(learnt)
        and len(learnt) <= _MOST_STRATEGIES
        and all(_is_tuple(each, 3) and _is_learnt(*each) for each in learnt)
    )
    _require("acceptance", sane, learnt, "drafter, shift, precision")
    _require(
        "age_seconds", _is_number(arrived.age_seconds) and arrived.age_seconds >= 0, arrived.age_seconds, "seconds"
    )


def check_type(field: str, value: object, wanted: type) -> None:
    _require(field, isinstance(value, wanted), type(value).__name__, wanted.__name__)


def _is_tuple(value: object, length: int | None = None) -> bool:
    return isinstance(value, tuple) and length in (None, len(value))


def _is_count(value: object) -> bool:
    return is_int(value) and 0 <= value <= _MOST_COUNTED  # type: ignore[operator]


def _is_number(value: object) -> bool:
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    return is_number and -_LARGEST <= value <= _LARGEST  # type: ignore[operator]


def _is_learnt(drafter: object, shift: object, precision: object) -> bool:
    return isinstance(drafter, str) and _is_number(shift) and _is_number(precision) and precision > 0  # type: ignore[operator]


def _array(name: str, values: object, dtype: type[np.generic], length: int) -> None:
    fits = isinstance(values, np.ndarray) and values.dtype == dtype and values.shape == (length,)
    theirs = (values.dtype.name, values.shape) if isinstance(values, np.ndarray) else type(values).__name__
    _require(name, fits, theirs, (np.dtype(dtype).name, (length,)))


def _same(field: str, theirs: object, ours: object) -> None:
    _require(field, type(theirs) is type(ours) and theirs == ours, theirs, ours)  # arrays have no single truth value


def _require(field: str, holds: object, theirs: object, ours: object) -> None:
    if not holds:
        raise SequenceStateError(field, theirs, ours)
