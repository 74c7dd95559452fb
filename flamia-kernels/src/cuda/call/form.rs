//! Which kernels a backward pass is of.

use flamia_sched::work::HeadSections;

use super::CallShape;
use crate::cuda::backward_fused::{BackwardFused, DqSums};
use crate::cuda::backward_keys::BackwardKeys;
use crate::cuda::backward_queries::BackwardQueries;
use crate::options::{BackwardForm, DqAccumulator, Options};

/// Rows of a document, on average, from which one kernel is taken to be the faster form.
///
/// Microseconds of the backward kernels on an H200, launches around the one kernel included (16 heads of 128, causal):
///
/// | packed row | mean document | two kernels | one kernel, FP16 sums |
/// | --- | --- | --- | --- |
/// | 1x16384 | 16,384 | 4,727 | 3,879 |
/// | 16x4096 | 4,096 | 5,095 | 4,364 |
/// | 4x4096 | 4,096 | 1,300 | 1,008 |
/// | 16x1024 | 1,024 | 452 | 418 |
/// | 32x512 | 512 | 307 | 330 |
/// | 8192 + 32x256 | 496 | 1,354 | 1,041 |
/// | 8192 + 224x256 | 291 | 1,937 | 1,792 |
/// | 64x256 | 256 | 232 | 281 |
///
/// One kernel takes two images of operands less, some 25 us of a row of 16,384. The host knows how many documents there are and
/// never where they end. Where four query heads share keys the whole training call of 11 documents in 16,384 rows took
/// 1,142 in one kernel and 1,189 in two.
pub const ONE_KERNEL_ROWS: usize = 280;

/// The same with FP32 sums: microseconds of the whole training call in two kernels and in one, mean documents of
/// 4,096 rows 1,923 and 1,752, 1,489 (11 of many lengths) 1,382 and 1,296, 1,024 rows 799 and 843.
pub const ONE_KERNEL_ROWS_FP32: usize = 1400;

/// A form of the backward pass, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormChoice {
    /// Never [`BackwardForm::Auto`].
    pub form: BackwardForm,
    /// What decided.
    pub reason: &'static str,
}

/// The form that calls of this shape run on a GPU: that of the options if they name one, else the faster by
/// [`ONE_KERNEL_ROWS`] or [`ONE_KERNEL_ROWS_FP32`]. One kernel adds dQ up in no fixed order: name two where runs have to repeat bit for
/// bit.
pub fn form_of(shape: &CallShape, options: &Options) -> FormChoice {
    let (form, reason) = match (options.backward, options.dq) {
        (BackwardForm::TwoKernel | BackwardForm::OneKernel, _) => {
            (options.backward, "it was asked for")
        }
        (BackwardForm::Auto, DqAccumulator::Fp32) => match shape.mean_document() {
            0..ONE_KERNEL_ROWS_FP32 => (
                BackwardForm::TwoKernel,
                "documents have fewer than 1400 rows on average, where two kernels took less time than FP32 sums",
            ),
            ONE_KERNEL_ROWS_FP32.. => (
                BackwardForm::OneKernel,
                "documents have 1400 rows or more on average, where one kernel took less time with FP32 sums too",
            ),
        },
        (BackwardForm::Auto, DqAccumulator::Fp16Causal) => (
            BackwardForm::TwoKernel,
            "one kernel has no references of dQ for single rows",
        ),
        (BackwardForm::Auto, DqAccumulator::Fp16) => match shape.mean_document() {
            0..ONE_KERNEL_ROWS => (
                BackwardForm::TwoKernel,
                "documents have fewer than 280 rows on average, where two kernels took less time",
            ),
            ONE_KERNEL_ROWS.. => (
                BackwardForm::OneKernel,
                "documents have 280 rows or more on average, where one kernel took less time",
            ),
        },
    };
    FormChoice { form, reason }
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
    use flamia_sched::Mask;

    use super::*;
    use crate::options::{Path, Profile};

    fn choice(tokens: usize, documents: usize, change: impl FnOnce(&mut Options)) -> FormChoice {
        let shape = CallShape {
            tokens,
            documents,
            heads: 16,
            kv_heads: 16,
            head_dim: 128,
        };
        let mut options = Options::new(Path::Mxfp8, Mask::Causal);
        options.profile = Profile::Hopper;
        change(&mut options);
        let choice = form_of(&shape, &options);
        // What is picked can be run.
        options.backward = choice.form;
        assert!(options.validate_training(128).is_ok(), "{options:?}");
        choice
    }

    /// The faster one of the measurements that the rule was fitted to.
    #[test]
    fn the_rule_picks_by_the_mean_document() {
        let form = |tokens, documents| choice(tokens, documents, |_| ()).form;
        assert_eq!(form(16_384, 1), BackwardForm::OneKernel);
        assert_eq!(form(16_384, 4), BackwardForm::OneKernel);
        assert_eq!(form(16_384, 33), BackwardForm::OneKernel);
        assert_eq!(form(65_536, 225), BackwardForm::OneKernel);
        assert_eq!(form(16_384, 64), BackwardForm::TwoKernel);
        assert_eq!(form(16_384, 32), BackwardForm::OneKernel);
        assert_eq!(form(14_000, 50), BackwardForm::OneKernel);
        assert_eq!(form(13_999, 50), BackwardForm::TwoKernel);
        assert_eq!(form(0, 0), BackwardForm::TwoKernel);
    }

    #[test]
    fn reasons_tell_the_threshold() {
        for (documents, form) in [(1, BackwardForm::OneKernel), (99, BackwardForm::TwoKernel)] {
            let picked = choice(16_384, documents, |_| ());
            assert_eq!(picked.form, form);
            let told = picked.reason.replace(',', "");
            assert!(told.contains(&ONE_KERNEL_ROWS.to_string()), "{told}");
        }
    }

    #[test]
    fn a_named_form_is_run_whatever_the_rule_picks() {
        for form in [BackwardForm::OneKernel, BackwardForm::TwoKernel] {
            for documents in [1, 1000] {
                let picked = choice(16_384, documents, |options| options.backward = form);
                assert_eq!(picked.form, form);
                assert!(picked.reason.contains("asked for"));
            }
        }
    }

    #[test]
    fn other_sums_than_fp16_have_rules_of_their_own() {
        let form = |documents, dq| choice(16_384, documents, |options| options.dq = dq).form;
        assert_eq!(form(11, DqAccumulator::Fp32), BackwardForm::OneKernel);
        assert_eq!(form(16, DqAccumulator::Fp32), BackwardForm::TwoKernel);
        assert_eq!(form(1, DqAccumulator::Fp16Causal), BackwardForm::TwoKernel);
    }
}
