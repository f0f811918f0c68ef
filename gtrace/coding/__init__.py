"""Symbols to bytes and back. Streams are little-endian and least significant bit first."""

from gtrace.coding.blocks import CodedBlock, Floats, decode_block, decode_floats, expected_floats
from gtrace.coding.elias import EliasCode, EliasKind
from gtrace.coding.envelope import ENVELOPE_BYTES, open_envelope, seal
from gtrace.coding.fixed import (
    check_symbol,
    checked_fixed,
    fixed_size,
    pack_fixed,
    packed_room,
    sign_first,
    sign_last,
    unpack_fixed,
    width_for,
)
from gtrace.coding.huffman import MAX_LENGTH, HuffmanCode, entropy, huffman_code, huffman_lengths, mean_length, tally
from gtrace.coding.lengths import pack_lengths, unpack_lengths

__all__ = [
    "ENVELOPE_BYTES",
    "MAX_LENGTH",
    "CodedBlock",
    "EliasCode",
    "EliasKind",
    "Floats",
    "HuffmanCode",
    "check_symbol",
    "checked_fixed",
    "decode_block",
    "decode_floats",
    "entropy",
    "expected_floats",
    "fixed_size",
    "huffman_code",
    "huffman_lengths",
    "mean_length",
    "open_envelope",
    "pack_fixed",
    "pack_lengths",
    "packed_room",
    "seal",
    "sign_first",
    "sign_last",
    "tally",
    "unpack_fixed",
    "unpack_lengths",
    "width_for",
]
