//! What an item costs in time.

/// The time of a work item: a part for being one, and one for each block that it visits
/// ([`Tiling::cost`](crate::work::Tiling::cost)). The unit of time is the caller's; the measured
/// presets are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Time of a block. Finite and not negative.
    pub per_block: f64,
    /// Time of an item beyond its blocks: entry, first loads, epilogue. Finite and not negative.
    pub per_item: f64,
}

impl Cost {
    /// Blocks as the unit of time, which schedules are compared in.
    pub const UNIT: Self = Self {
        per_block: 1.0,
        per_item: 0.0,
    };

    /// Microseconds of an FP8 forward kernel at head dimension 128 on an H200, measured on skeleton
    /// kernels that launch one CTA per item of 128 queries (`item_rows` of one
    /// [`TILE`](crate::TILE)): 0.99 to 1.06 a block of 128 keys, 4.6 an item.
    pub const HOPPER_FORWARD: Self = Self {
        per_block: 1.03,
        per_item: 4.6,
    };

    /// Microseconds of the kernel for dK and dV of a two-kernel FP8 backward pass, measured as for
    /// [`HOPPER_FORWARD`](Self::HOPPER_FORWARD): items of 128 keys, 1.16 for 64 queries and so twice
    /// that for a block of 128, 7.9 an item.
    pub const HOPPER_BACKWARD: Self = Self {
        per_block: 2.32,
        per_item: 7.9,
    };

    /// The time of an item of so many blocks.
    pub fn of(&self, blocks: usize) -> f64 {
        self.per_item + self.per_block * blocks as f64
    }
}
