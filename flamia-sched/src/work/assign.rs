//! Which CTA of a grid gets which position.

use crate::{Documents, Mask};

/// How the CTAs of a persistent forward grid come to their next position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Acquisition {
    /// Each CTA knows its positions beforehand: [`alternating`].
    Static,
    /// A CTA that is done takes the next free position: an atomic counter on Hopper, Cluster
    /// Launch Control on Blackwell.
    Dynamic,
}

impl Acquisition {
    /// The paper's rule (section 3.6.2): dynamic where work is uneven, which is under any causal
    /// mask, and under a full one if the longest document has at least four times the mean length.
    pub fn choose(mask: Mask, documents: &Documents) -> Self {
        let present = documents.iter().filter(|rows| !rows.is_empty()).count();
        Self::from_lengths(mask, documents.longest(), present, documents.total())
    }

    /// The rule from what a GPU knows of the documents: the longest one's rows, how many are not
    /// empty, and the rows of all.
    pub fn from_lengths(mask: Mask, longest: usize, documents: usize, total: usize) -> Self {
        let skewed = longest as u128 * documents as u128 >= 4 * total as u128 && total > 0;
        if mask.is_causal() || skewed {
            Self::Dynamic
        } else {
            Self::Static
        }
    }
}

/// The positions of `cta` in a persistent grid of `grid` CTAs: one of each run of `grid` positions,
/// every other run backwards. Over a list sorted by cost, whoever got the longest of one run gets
/// the shortest of the next.
///
/// # Panics
/// If `cta` is not in the grid.
pub fn alternating(grid: usize, cta: usize, positions: usize) -> impl Iterator<Item = usize> {
    assert!(cta < grid, "CTA {cta} of a grid of {grid}");
    (0..positions.div_ceil(grid))
        .map(move |round| {
            let place = if round % 2 == 0 { cta } else { grid - 1 - cta };
            round * grid + place
        })
        .filter(move |&position| position < positions)
}
