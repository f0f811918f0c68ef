"""Symbols to bytes and back. Streams are little-endian and least significant bit first."""

from gtrace.coding.envelope import ENVELOPE_BYTES, open_envelope, seal
from gtrace.coding.fixed import (
    check_symbol,
    checked_fixed,
    fixed_size,
    pack_fixed,
    packed_room,
    unpack_fixed,
    width_for,
)
from gtrace.coding.huffman import MAX_LENGTH, HuffmanCode, huffman_lengths

__all__ = [
    "ENVELOPE_BYTES",
    "MAX_LENGTH",
    "HuffmanCode",
    "check_symbol",
    "checked_fixed",
    "fixed_size",
    "huffman_lengths",
    "open_envelope",
    "pack_fixed",
    "packed_room",
    "seal",
    "unpack_fixed",
    "width_for",
]
