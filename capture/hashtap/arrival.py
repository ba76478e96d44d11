"""The check of a frame that arrives from the kernel: is it whole, and is it the one that its record waits for?

Of the row checksums a sample is recomputed, spread evenly from the first row to the last: what goes wrong between
kernel and writer (bytes that have not arrived yet, memory that was reused) hits stretches of rows. ``verify`` does all.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from hashtap.errors import FormatError
from hashtap.facts import ShardFacts
from hashtap.flight import Record
from hashtap.frame import Table, payload_values
from hashtap.header import Header, parse_header
from hashtap_kernels.layout import HEADER_BYTES, Payload
from hashtap_kernels.proof import prompt_proof, row_sums

__all__ = ["SAMPLED_ROWS", "OtherTokens", "check_arrival"]

SAMPLED_ROWS = 17
"""Rows of a frame that are checked: all of a small one, the last and every 16th, about, of a full one."""


class OtherTokens(FormatError):
    """The forward consumed other tokens than the record's own."""


def check_arrival(
    frame: npt.NDArray[np.uint8], record: Record, facts: ShardFacts, tables: Callable[[int], Table]
) -> Header:
    """Check a kernel's frame; returns its header.

    Args:
        frame: uint8, of exactly the frame's length.
        record: whose frame it must be.
        facts: of the run; geometry and seed count.
        tables: gives the reference-exponent table of an id, FormatError when there is none.

    Raises:
        OtherTokens: when the forward did not consume the record's own tokens.
        FormatError: when anything else is not as it must be.
    """
    header = parse_header(frame)
    geometry, first, tokens = facts.geometry, header.first_position, header.tokens
    if header.payload is Payload.TABLE or header.geometry != geometry or len(frame) != geometry.frame_bytes(tokens):
        raise FormatError(f"a frame of {len(frame)} bytes and {header.geometry} came where {geometry} is captured")
    came = (header.serial, header.key, header.total_tokens)
    if came != (record.serial, record.key, len(record.token_ids)):
        raise FormatError(f"a frame of pass {came[0]}, key {came[1].hex()}, {came[2]} tokens came in its place")
    payload_end = HEADER_BYTES + tokens * geometry.row_bytes
    table = tables(header.table) if header.payload is Payload.PLANES else None
    rows = _sampled_rows(tokens)
    values = payload_values(frame[HEADER_BYTES:payload_end], header, table, rows)
    sums = frame[payload_end : payload_end + 8 * tokens].view(np.uint64)
    wrong = rows[row_sums(values.view(np.uint64), first + rows) != sums[rows]]
    if len(wrong):
        raise FormatError(f"the row at position {first + wrong[0]} fails its checksum, of {tokens} rows from {first}")
    if header.proof != prompt_proof(record.token_ids[first : first + tokens], first, facts.seed):
        raise OtherTokens(f"the forward consumed other tokens than its own in the {tokens} from position {first} on")
    return header


@cache
def _sampled_rows(tokens: int) -> npt.NDArray[np.int64]:
    return np.unique(np.linspace(0, tokens - 1, SAMPLED_ROWS, dtype=np.int64))
