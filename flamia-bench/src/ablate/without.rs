//! Which optimisations can be left out, and what takes their place.

use std::fmt;
use std::num::NonZero;

use clap::ValueEnum;
use flamia_kernels::cuda::call::{SavedImages, Sections, Tuning};
use flamia_kernels::{BackwardForm, DqAccumulator};

use super::row::Pass;
use crate::attention::way::{Schedule, Way};

/// What is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Without {
    /// Items with most work first: they go out in the order of the packed row
    LongestFirst,
    /// Items of the forward pass acquired when a CTA is free: each CTA knows its own from the start, and
    /// all heads are in one section
    Dynamic,
    /// The rule that cuts heads into sections on long rows: all heads are in one section
    Sections,
    /// One section of heads wherever it is faster: every key/value head is a section of its own
    WideSections,
    /// Kernels that start while what is in front of them ends, quantisers among them
    EarlyStarts,
    /// dQ's kernel beginning at the last items of dK and dV, where there are two backward kernels
    Overlap,
    /// One saved image of Q, K and V: all that the backward pass reads are saved, made in one pass, and it moves
    /// none
    OneImage,
    /// Quantisers that make both images in one pass: as `one-image`, the second moved out of the first (beside
    /// it)
    OnePass,
    /// One backward kernel where the rule picks it: two, as deterministic runs have them
    OneKernel,
    /// Sums of dQ in FP16 where the rule picks one backward kernel: sums in FP32
    Fp16Sums,
    /// Two backward kernels where the rule picks them: one, with dQ added up in FP16
    TwoKernels,
}

impl Without {
    /// All of them.
    pub const ALL: [Without; 11] = [
        Without::LongestFirst,
        Without::Dynamic,
        Without::Sections,
        Without::WideSections,
        Without::EarlyStarts,
        Without::Overlap,
        Without::OneImage,
        Without::OnePass,
        Without::OneKernel,
        Without::Fp16Sums,
        Without::TwoKernels,
    ];

    /// How the call is made then.
    pub fn way(self) -> Way {
        let way = Way::default();
        let tuned = |change: fn(&mut Tuning)| {
            let mut tuning = way.tuning;
            change(&mut tuning);
            Way { tuning, ..way }
        };
        let one_kernel = |dq| Way {
            backward: BackwardForm::OneKernel,
            dq,
            ..way
        };
        match self {
            Without::LongestFirst => Way {
                schedule: Schedule::InOrder,
                ..way
            },
            Without::Dynamic => Way {
                schedule: Schedule::Static,
                // Several sections are always acquired dynamically.
                ..tuned(|tuning| tuning.sections = Sections::Whole)
            },
            Without::Sections => tuned(|tuning| tuning.sections = Sections::Whole),
            Without::WideSections => {
                tuned(|tuning| tuning.sections = Sections::Of(NonZero::<usize>::MIN))
            }
            Without::EarlyStarts => tuned(|tuning| tuning.starts_early = false),
            Without::Overlap => tuned(|tuning| tuning.overlaps_gradients = false),
            Without::OneImage => Way {
                images: SavedImages::Both,
                ..way
            },
            Without::OnePass => Way {
                images: SavedImages::Both,
                ..tuned(|tuning| tuning.fuses_images = false)
            },
            Without::OneKernel => Way {
                backward: BackwardForm::TwoKernel,
                ..way
            },
            // Named, since the rule picks two for such sums.
            Without::Fp16Sums => one_kernel(DqAccumulator::Fp32),
            Without::TwoKernels => one_kernel(DqAccumulator::Fp16),
        }
    }

    /// What takes its place, in a line.
    pub const fn instead(self) -> &'static str {
        match self {
            Without::LongestFirst => "items in the order of the row",
            Without::Dynamic => "forward items assigned from the start",
            Without::Sections => "all heads in one section",
            Without::WideSections => "a section for each key/value head",
            Without::EarlyStarts => "every kernel waits for the one in front",
            Without::Overlap => "dQ after dK and dV",
            Without::OneImage => "all images saved, made in one pass",
            Without::OnePass => "all images saved, the second moved",
            Without::OneKernel => "two backward kernels",
            Without::Fp16Sums => "one backward kernel, dQ in FP32",
            Without::TwoKernels => "one backward kernel, dQ in FP16",
        }
    }

    /// Whether a call of this pass, with a backward pass of the form that the rule picks, has it to leave out.
    pub const fn shows_in(self, pass: Pass, form: BackwardForm) -> bool {
        let trains = matches!(pass, Pass::Train);
        let is_one_kernel = matches!(form, BackwardForm::OneKernel);
        match self {
            Without::LongestFirst
            | Without::Dynamic
            | Without::Sections
            | Without::WideSections
            | Without::EarlyStarts => true,
            // A forward pass alone saves nothing, and has no gradients.
            Without::OneImage | Without::OnePass => trains,
            Without::OneKernel | Without::Fp16Sums => trains && is_one_kernel,
            Without::Overlap | Without::TwoKernels => trains && !is_one_kernel,
        }
    }
}

impl fmt::Display for Without {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.pad(value.as_ref().map_or("", |value| value.get_name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::row::Masking;

    const FORMS: [BackwardForm; 2] = [BackwardForm::TwoKernel, BackwardForm::OneKernel];

    /// The call that is made where the rule picks a form, without what that form does not read.
    fn made(way: Way, by_rule: BackwardForm) -> Way {
        let mut made = way;
        if made.backward == BackwardForm::Auto {
            made.backward = by_rule;
        }
        match made.backward {
            BackwardForm::OneKernel => made.tuning.overlaps_gradients = true,
            _ => made.dq = DqAccumulator::default(),
        }
        made
    }

    #[test]
    fn every_way_is_another_one_and_a_call_that_can_be_made() {
        let mut ways = vec![Way::default()];
        for without in Without::ALL {
            let way = without.way();
            assert!(!ways.contains(&way), "{without}");
            ways.push(way);
            let options = way.options(Masking::Causal);
            assert!(options.validate_training(128).is_ok(), "{without}");
        }
        assert_eq!(Without::ALL.as_slice(), Without::value_variants());
    }

    #[test]
    fn calls_that_are_the_same_without_it_are_not_timed_twice() {
        for form in FORMS {
            let as_it_is = made(Way::default(), form);
            let mut shown = Vec::new();
            for without in Without::ALL {
                let call = made(without.way(), form);
                if without.shows_in(Pass::Train, form) {
                    assert!(call != as_it_is && !shown.contains(&call), "{without}");
                    shown.push(call);
                } else {
                    // Sums of dQ in FP32 are nothing that two kernels are without.
                    let is_same = call == as_it_is || without == Without::Fp16Sums;
                    assert!(is_same, "{without} {form}");
                }
            }
        }
        for without in Without::ALL {
            let shows = FORMS.map(|form| without.shows_in(Pass::Train, form));
            assert!(shows.contains(&true), "{without}");
        }
    }

    #[test]
    fn what_shows_in_a_forward_pass_alone_is_no_matter_of_gradients() {
        for without in Without::ALL {
            let way = without.way();
            let as_it_is = Way {
                tuning: Tuning {
                    overlaps_gradients: way.tuning.overlaps_gradients,
                    fuses_images: way.tuning.fuses_images,
                    ..Way::default().tuning
                },
                images: way.images,
                backward: way.backward,
                dq: way.dq,
                ..Way::default()
            };
            for form in FORMS {
                assert_eq!(
                    without.shows_in(Pass::Fwd, form),
                    way != as_it_is,
                    "{without}"
                );
            }
        }
    }
}
