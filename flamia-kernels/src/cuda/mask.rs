//! What kernels are told of a mask.

use flamia_sched::Mask;

/// The macro MASK of `tiles.cuh`. The length of a window is no part of it.
pub(super) fn define(mask: Mask) -> (&'static str, String) {
    let name = match mask {
        Mask::Causal => "CAUSAL",
        Mask::Full => "FULL",
        Mask::Window(_) => "WINDOW",
    };
    ("MASK", name.to_owned())
}

/// Keys of a window, with room for what kernels subtract; 0 where there is none.
pub(super) fn window(mask: Mask) -> i32 {
    const MOST: i32 = i32::MAX - 256;
    match mask {
        Mask::Window(keys) => i32::try_from(keys.get()).map_or(MOST, |keys| keys.min(MOST)),
        Mask::Causal | Mask::Full => 0,
    }
}
