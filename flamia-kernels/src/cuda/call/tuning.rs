//! What makes whole calls faster and does not change what they compute.

use std::num::NonZero;

use flamia_sched::work::HeadSections;

/// In which order heads are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Sections {
    /// As the rule has it that was fitted to measurements: all in one section, but where the L2 cache
    /// thrashes.
    #[default]
    Rule,
    /// All in one section.
    Whole,
    /// So many key/value heads in a section, with the query heads that share them.
    Of(NonZero<usize>),
}

impl Sections {
    /// Instead of the rule's, for heads of which `group` share what a section keeps in the cache.
    pub(super) fn instead_of(self, rule: HeadSections, group: usize) -> HeadSections {
        let count = |n| NonZero::new(n).unwrap_or(NonZero::<usize>::MIN);
        let heads = count(rule.heads());
        match self {
            Sections::Rule => rule,
            Sections::Whole => HeadSections::whole(heads),
            Sections::Of(kv_heads) => {
                HeadSections::new(heads, kv_heads.saturating_mul(count(group)))
            }
        }
    }
}

/// How the launches of a call go out. The default is the fastest that is known; the others show what
/// each part of it buys. Results do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuning {
    #[allow(missing_docs)]
    pub sections: Sections,
    /// Whether quantisers and the attention kernels behind them begin while what is in front of them on
    /// the stream is at its last blocks.
    pub starts_early: bool,
    /// Whether both images of an operand, where both are saved, are made in one pass over it: otherwise the
    /// row image is made first, and the other from it.
    pub fuses_images: bool,
    /// Whether dQ's kernel begins while that of dK and dV is at its last items.
    pub overlaps_gradients: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            sections: Sections::Rule,
            starts_early: true,
            fuses_images: true,
            overlaps_gradients: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_of_whole_groups() {
        let number = |n| NonZero::new(n).unwrap();
        let rule = HeadSections::new(number(16), number(6));
        let per_section =
            |sections: Sections, group| sections.instead_of(rule, group).per_section();
        assert_eq!(per_section(Sections::Rule, 4), 6);
        assert_eq!(per_section(Sections::Whole, 4), 16);
        assert_eq!(per_section(Sections::Of(number(1)), 4), 4);
        assert_eq!(per_section(Sections::Of(number(2)), 1), 2);
        assert_eq!(per_section(Sections::Of(number(9)), 4), 16);
    }
}
