//! Two 4-bit codes to a byte: the one with the lower index in the low nibble.

use crate::e2m1::E2M1;

/// Bytes that `count` codes take.
pub const fn packed_len(count: usize) -> usize {
    count.div_ceil(2)
}

/// Packs codes. Of an odd number the last byte's high nibble is zero.
pub fn pack(codes: &[E2M1]) -> impl Iterator<Item = u8> {
    codes.chunks(2).map(|pair| {
        let high = pair.get(1).map_or(0, |code| code.0 << 4);
        high | pair[0].0 & 0xF
    })
}

/// The codes in packed bytes, two for each.
pub fn unpack(bytes: &[u8]) -> impl Iterator<Item = E2M1> {
    bytes
        .iter()
        .flat_map(|&byte| [E2M1(byte & 0xF), E2M1(byte >> 4)])
}
