//! Run-time choice of the instruction set.
//!
//! The numeric code is ordinary Rust that the compiler vectorises. Compiling it once per
//! instruction set keeps the binary portable. The result does not depend on the choice: every
//! fused multiply-add is written as `mul_add`, each output element is one chain of them in a fixed
//! order, and lane counts that show in a sum are constants.

use super::gemm::{Gemm, Operand, Shape, accumulate};
use super::real::Real;

/// A piece of numeric work. `run` must be `#[inline(always)]`, as must all it calls, so that it is
/// compiled with the features of its caller.
pub(crate) trait Task {
    type Output;
    fn run<G: Gemm>(self) -> Self::Output;
}

/// Runs `task` with the widest instruction set this processor has.
pub(crate) fn dispatch<T: Task>(task: T) -> T::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if x86::has_avx512() {
            // SAFETY: the processor has the features, as just checked.
            return unsafe { x86::run_avx512(task) };
        }
        if x86::has_avx2() {
            // SAFETY: the processor has the features, as just checked.
            return unsafe { x86::run_avx2(task) };
        }
    }
    task.run::<Baseline>()
}

/// What every processor of the target has.
pub(crate) struct Baseline;

impl Gemm for Baseline {
    #[inline(never)]
    fn accumulate<R: Real>(c: &mut [R], a: Operand<R>, b: &[R], shape: Shape) {
        accumulate::<R, 4, 16>(c, a, b, shape);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Gemm, Operand, Real, Shape, Task, accumulate};

    pub fn has_avx512() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && has_avx2()
    }

    pub fn has_avx2() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }

    /// Only [`run_avx512`] names this type.
    struct Avx512;
    /// Only [`run_avx2`] names this type.
    struct Avx2;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub fn run_avx512<T: Task>(task: T) -> T::Output {
        task.run::<Avx512>()
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn run_avx2<T: Task>(task: T) -> T::Output {
        task.run::<Avx2>()
    }

    // Products are called, not inlined: a task has many of them, and each is large once unrolled.

    impl Gemm for Avx512 {
        #[inline(always)]
        fn accumulate<R: Real>(c: &mut [R], a: Operand<R>, b: &[R], shape: Shape) {
            // SAFETY: `Avx512` is named only where the features are.
            unsafe { accumulate_avx512(c, a, b, shape) }
        }
    }

    impl Gemm for Avx2 {
        #[inline(always)]
        fn accumulate<R: Real>(c: &mut [R], a: Operand<R>, b: &[R], shape: Shape) {
            // SAFETY: `Avx2` is named only where the features are.
            unsafe { accumulate_avx2(c, a, b, shape) }
        }
    }

    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn accumulate_avx512<R: Real>(c: &mut [R], a: Operand<R>, b: &[R], shape: Shape) {
        accumulate::<R, 8, 32>(c, a, b, shape);
    }

    #[inline(never)]
    #[target_feature(enable = "avx2,fma")]
    fn accumulate_avx2<R: Real>(c: &mut [R], a: Operand<R>, b: &[R], shape: Shape) {
        accumulate::<R, 4, 16>(c, a, b, shape);
    }
}
