//! The order of heads: which item and head is at a position of the schedule.

use std::num::NonZero;

use super::Acquisition;

/// Heads in sections: all items of a section's heads come before the next section.
///
/// Position by position: sections; in a section the items, longest first; for an item the heads of
/// the section. The keys and values (forward) or queries, gradients and dQ sums (backward) that are
/// in flight at one time are those of one section, which is what the L2 cache has to hold
/// (the paper's section 3.6.2; 22.5 % of the backward pass in its section 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSections {
    heads: NonZero<usize>,
    per_section: NonZero<usize>,
}

impl HeadSections {
    /// `heads` heads in sections of `per_section`, the last one possibly smaller. More than
    /// `heads` in a section means all of them.
    pub fn new(heads: NonZero<usize>, per_section: NonZero<usize>) -> Self {
        Self {
            heads,
            per_section: per_section.min(heads),
        }
    }

    /// One section of all heads: longest first over everything.
    pub fn whole(heads: NonZero<usize>) -> Self {
        Self::new(heads, heads)
    }

    /// As many heads in a section as fit `l2_bytes` with `bytes_per_row` of operands per row and
    /// head, in whole groups of `group` query heads that share keys and values if one fits. Depends
    /// on the row length alone, never on the documents.
    pub fn fitting(
        heads: NonZero<usize>,
        group: NonZero<usize>,
        total: usize,
        bytes_per_row: usize,
        l2_bytes: usize,
    ) -> Self {
        let per_head = total.saturating_mul(bytes_per_row).max(1);
        let fit = l2_bytes / per_head;
        let whole_groups = fit / group * group.get();
        let per_section = if whole_groups > 0 { whole_groups } else { fit };
        Self::new(
            heads,
            NonZero::new(per_section).unwrap_or(NonZero::<usize>::MIN),
        )
    }

    /// Heads in all.
    pub fn heads(&self) -> usize {
        self.heads.get()
    }

    /// Heads of a section.
    pub fn per_section(&self) -> usize {
        self.per_section.get()
    }

    /// How CTAs get at positions in this order, if they would do so with one section. Every section
    /// starts again with its longest item, and the alternating assignment evens out one falling
    /// order only: a CTA can get the longest items of many sections.
    pub fn acquisition(&self, in_one_section: Acquisition) -> Acquisition {
        if self.per_section < self.heads {
            Acquisition::Dynamic
        } else {
            in_one_section
        }
    }

    /// Positions of a schedule with so many items.
    pub fn positions(&self, items: usize) -> usize {
        items * self.heads.get()
    }

    /// The item (an index into the list of `items`) and the head at `position`, `None` past the
    /// last.
    pub fn at(&self, position: usize, items: usize) -> Option<(usize, usize)> {
        if position >= self.positions(items) {
            return None;
        }
        let section = position / (items * self.per_section.get());
        let first_head = section * self.per_section.get();
        let within = position - first_head * items;
        let width = self.per_section.get().min(self.heads.get() - first_head);
        Some((within / width, first_head + within % width))
    }
}
