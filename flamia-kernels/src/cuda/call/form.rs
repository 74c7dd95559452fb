//! Which kernels a backward pass is of.

use flamia_sched::work::HeadSections;

use crate::cuda::backward_fused::{BackwardFused, DqSums};
use crate::cuda::backward_keys::BackwardKeys;
use crate::cuda::backward_queries::BackwardQueries;
use crate::options::{BackwardForm, DqAccumulator, Options};

/// A form of the backward pass, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormChoice {
    #[allow(missing_docs)]
    pub form: BackwardForm,
    /// The measurement that decides.
    pub reason: &'static str,
}

/// The form that takes the least time on an H200, whatever the documents: two kernels, which are also
/// the form whose bits are the same in every run. It is the default of [`Options::backward`]; one kernel,
/// in 10 to 18 % more time (bench/LOG.md, the backward pass's kernels), runs where it is asked for.
pub const fn fastest_form() -> FormChoice {
    FormChoice {
        form: BackwardForm::TwoKernel,
        reason: "one kernel took 10 to 18 % longer on every row that was measured, with sums in FP16 as \
                 in FP32 (bench/LOG.md), and its dQ is not the same bits in every run",
    }
}

/// The kernels of a form.
pub(super) enum FormKernels {
    Two {
        keys: BackwardKeys,
        queries: BackwardQueries,
        query_sections: HeadSections,
    },
    One {
        kernels: BackwardFused,
        /// Bytes of what dQ is added up in.
        sums: usize,
    },
}

impl FormKernels {
    /// Bytes of scratch beside what both forms take.
    pub const fn scratch_bytes(&self) -> usize {
        match self {
            FormKernels::Two { .. } => 0,
            FormKernels::One { sums, .. } => *sums,
        }
    }
}

/// What one kernel adds dQ up in, with options that were validated.
pub(super) fn dq_sums(options: &Options) -> DqSums {
    match options.dq {
        DqAccumulator::Fp32 => DqSums::Fp32,
        // One kernel is refused `fp16-causal`, whose references follow single rows.
        DqAccumulator::Fp16 | DqAccumulator::Fp16Causal => DqSums::Fp16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_the_fastest_form() {
        assert_eq!(fastest_form().form, BackwardForm::default());
        assert!(fastest_form().reason.contains("bench/LOG.md"));
    }
}
