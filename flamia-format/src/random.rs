//! Random bits as a function of a seed and a counter.
//!
//! There is no state to share or to split: whoever rounds element `i` asks for `bits(seed, i)`, so
//! that the same seed gives the same bits in any order and on any number of threads.

/// 2^64 divided by the golden ratio, made odd: consecutive counters land far apart.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// 32 uniform bits for `counter` under `seed`.
///
/// The upper half of SplitMix64's output number `counter`, the generator's start taken from `seed`
/// by the same mixer, so that neighbouring seeds have unrelated streams. SplitMix64 is the rare
/// generator whose n-th output costs no more than its first; its statistics are known (it passes
/// BigCrush), and two multiplications, shifts and no table make vector code. Seeds select stretches
/// of one sequence of 2^64: that any two of a thousand seeds overlap within 2^32 draws each has a
/// probability of 2^-12.
#[inline(always)]
pub const fn bits(seed: u64, counter: u64) -> u32 {
    let start = mix(seed.wrapping_add(GOLDEN));
    (mix(start.wrapping_add(counter.wrapping_mul(GOLDEN))) >> 32) as u32
}

/// SplitMix64's output function, a bijection in which every input bit flips every output bit with a
/// probability near one half.
#[inline(always)]
const fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
