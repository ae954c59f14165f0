"""An answer of the child as it travels: the lengths of its two parts, JSON, and arrays."""

from __future__ import annotations

import struct

LENGTHS = struct.Struct("<II")  # in bytes
