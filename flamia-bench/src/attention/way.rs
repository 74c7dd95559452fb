//! How our own call is made.

use flamia_kernels::cuda::call::{FormChoice, SavedImages, Tuning, form_of};
use flamia_kernels::{BackwardForm, DqAccumulator, Mask, Options, Path, Profile};

use super::row::Masking;
use super::workload::Shape;

/// In which order items of a packed row go out, and how they are acquired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Schedule {
    /// As the GPU builds it: longest first, acquired by the rule.
    #[default]
    Built,
    /// In the order of the packed row.
    InOrder,
    /// As it is built, but that each CTA of the forward pass has its items from the start.
    Static,
}

/// What is saved, which kernels run, and how they are launched.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Way {
    #[allow(missing_docs)]
    pub images: SavedImages,
    /// As the options have it: the rule picks unless one is named.
    pub backward: BackwardForm,
    /// What one kernel adds dQ up in.
    pub dq: DqAccumulator,
    #[allow(missing_docs)]
    pub tuning: Tuning,
    #[allow(missing_docs)]
    pub schedule: Schedule,
}

impl Way {
    /// The form of the backward pass on a workload, and what decided.
    pub fn form(&self, shape: &Shape, mask: Masking) -> FormChoice {
        form_of(&shape.of_call(), &self.options(mask))
    }

    /// The options that are timed, and compared with the CPU.
    pub fn options(&self, mask: Masking) -> Options {
        Options {
            profile: Profile::Hopper,
            backward: self.backward,
            dq: self.dq,
            ..Options::new(Path::Mxfp8, Mask::from(mask))
        }
    }
}

impl From<Masking> for Mask {
    fn from(mask: Masking) -> Self {
        match mask {
            Masking::Causal => Mask::Causal,
            Masking::Full => Mask::Full,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_what_users_get() {
        let mut wanted = Options::new(Path::Mxfp8, Mask::Causal);
        wanted.profile = Profile::Hopper;
        assert_eq!(Way::default().options(Masking::Causal), wanted);
        assert_eq!(Way::default().options(Masking::Full).mask, Mask::Full);
    }
}
