//! In which order items go out, and how CTAs come to them.

use std::cmp::Reverse;

use crate::Documents;
use crate::work::{BackwardLaunch, HeadSections, Tiling, WorkItem};

/// In which order the items of a section of heads go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Documents as they come, first rows first.
    Input,
    /// Documents as they come, each with all its sections of heads, most work first within it: the
    /// order of FlashAttention-4 (the paper's section 3.6.2).
    LongestFirstInDocuments,
    /// Most work first over all documents: [`Tiling::longest_first`].
    LongestFirst,
}

/// When a CTA asks for its next position, which is reserved for it from then on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Request {
    /// So long before it is done with its item, at the item's start at the earliest: the paper asks
    /// after the item's last loads, so that the answer is there in time.
    BeforeEnd(f64),
    /// As soon as it starts an item. Who got a long one holds a second one back.
    AtStart,
}

/// How CTAs come to their positions. At first, CTA `i` has position `i`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Assignment {
    /// CTA `i` of `n` does positions `i`, `n + i`, `2n + i`, ….
    Strided,
    /// [`work::alternating`](crate::work::alternating).
    Alternating,
    /// Whoever asks first gets the next position, the lowest CTA of several at once.
    Dynamic {
        /// When a CTA asks.
        request: Request,
        /// Time from asking to being able to start.
        latency: f64,
    },
    /// The two launches of the backward pass: a CTA per position of the first one goes out in
    /// order, each to the multiprocessor that is free first; the second launch starts when the first
    /// is done. What a launch and a CTA without a position cost is not counted.
    Launches(BackwardLaunch),
}

impl Assignment {
    /// Dynamic with the next position at hand whenever an item ends.
    pub const DYNAMIC: Self = Self::Dynamic {
        request: Request::BeforeEnd(0.0),
        latency: 0.0,
    };

    /// Dynamic, but reserving a position for the whole time of the item before it.
    pub const PREMATURE: Self = Self::Dynamic {
        request: Request::AtStart,
        latency: 0.0,
    };
}

/// A way to schedule a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Order of the items.
    pub order: Order,
    /// How many heads there are, and which go together. Under [`Order::Input`], sections of one head
    /// number the positions as a plain grid of (tile, document, head) does.
    pub sections: HeadSections,
    /// Who gets which position.
    pub assignment: Assignment,
}

impl Policy {
    /// The item and the head at every position.
    pub fn positions(&self, tiling: &Tiling, documents: &Documents) -> Vec<(WorkItem, usize)> {
        let mut items = match self.order {
            Order::LongestFirst => tiling.longest_first(documents),
            Order::Input | Order::LongestFirstInDocuments => tiling.items(documents).collect(),
        };
        let in_sections = |items: &[WorkItem]| -> Vec<_> {
            (0..)
                .map_while(|position| self.sections.at(position, items.len()))
                .map(|(item, head)| (items[item], head))
                .collect()
        };
        if self.order != Order::LongestFirstInDocuments {
            return in_sections(&items);
        }
        items.sort_by_key(|item| (item.document, Reverse(tiling.cost(item))));
        items
            .chunk_by(|a, b| a.document == b.document)
            .flat_map(in_sections)
            .collect()
    }
}
