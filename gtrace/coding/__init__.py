"""Symbols to bytes and back. Streams are little-endian and least significant bit first."""

from gtrace.coding.elias import EliasCode, EliasKind
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
from gtrace.coding.huffman import MAX_LENGTH, HuffmanCode, entropy, huffman_code, huffman_lengths, mean_length

__all__ = [
    "ENVELOPE_BYTES",
    "MAX_LENGTH",
    "EliasCode",
    "EliasKind",
    "HuffmanCode",
    "check_symbol",
    "checked_fixed",
    "entropy",
    "fixed_size",
    "huffman_code",
    "huffman_lengths",
    "mean_length",
    "open_envelope",
    "pack_fixed",
    "packed_room",
    "seal",
    "unpack_fixed",
    "width_for",
]
