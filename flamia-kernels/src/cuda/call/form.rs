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
/// One kernel takes two images of operands less, some 25 us of a row of 16,384. With FP32 sums an earlier build of it took
/// 1,611 of 4x4096. The host knows how many documents there are and never where they end.
/// Where query heads share keys there are fewer and longer items: the backward pass of 11 documents of 16,384 rows with 4
/// key/value heads took 1,102 microseconds in one kernel and 874 in two, quantisation included; in different orders
/// of documents, so that this is to be measured again.
pub const ONE_KERNEL_ROWS: usize = 280;

/// A form of the backward pass, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormChoice {
    /// Never [`BackwardForm::Auto`].
    pub form: BackwardForm,
    /// What decided.
    pub reason: &'static str,
}

/// The form that calls of this shape run on a GPU: that of the options if they name one, else the faster by
/// [`ONE_KERNEL_ROWS`]. One kernel adds dQ up in no fixed order: name two where runs have to repeat bit for
/// bit.
pub fn form_of(shape: &CallShape, options: &Options) -> FormChoice {
    let (form, reason) = match (options.backward, options.dq) {
        (BackwardForm::TwoKernel | BackwardForm::OneKernel, _) => {
            (options.backward, "it was asked for")
        }
        (BackwardForm::Auto, DqAccumulator::Fp32) => (
            BackwardForm::TwoKernel,
            "sums of dQ in FP32 made one kernel slower on every row that was measured",
        ),
        (BackwardForm::Auto, DqAccumulator::Fp16Causal) => (
            BackwardForm::TwoKernel,
            "one kernel has no references of dQ for single rows",
        ),
        (BackwardForm::Auto, DqAccumulator::Fp16) if shape.group() > 1 => (
            BackwardForm::TwoKernel,
            "query heads share keys, where two kernels took less time",
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
    fn query_heads_that_share_keys_make_it_two_kernels() {
        for (kv_heads, form) in [
            (16, BackwardForm::OneKernel),
            (8, BackwardForm::TwoKernel),
            (4, BackwardForm::TwoKernel),
        ] {
            let shape = CallShape {
                tokens: 16_384,
                documents: 1,
                heads: 16,
                kv_heads,
                head_dim: 128,
            };
            let options = Options::new(Path::Mxfp8, Mask::Causal);
            assert_eq!(form_of(&shape, &options).form, form, "{kv_heads}");
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
    fn other_sums_than_fp16_make_it_two_kernels() {
        for dq in [DqAccumulator::Fp32, DqAccumulator::Fp16Causal] {
            let picked = choice(16_384, 1, |options| options.dq = dq);
            assert_eq!(picked.form, BackwardForm::TwoKernel, "{dq}");
        }
    }
}
