"""Window: which rows of a batch travel with which of its micro-batches, and moving them."""

from rowmesh.ops.window.cpu import (
    FINAL,
    FORMS,
    MAX_PARTS,
    choose_phases,
    count_cells,
    count_phases,
    kernels,
    mark_final,
    note_touched,
    order_uses,
    pack_bits,
    place_own,
    place_rows,
    spread,
    unpack_bits,
)

__all__ = [
    "FINAL",
    "FORMS",
    "MAX_PARTS",
    "choose_phases",
    "count_cells",
    "count_phases",
    "kernels",
    "mark_final",
    "note_touched",
    "order_uses",
    "pack_bits",
    "place_own",
    "place_rows",
    "spread",
    "unpack_bits",
]
