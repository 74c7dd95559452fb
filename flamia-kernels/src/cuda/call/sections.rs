//! In which sections a launch takes heads, so that what they share stays in the L2 cache.

use std::num::NonZero;

use flamia_sched::Mask;
use flamia_sched::work::HeadSections;

use super::CallShape;

/// Rows whose documents go out together in the backward pass ([`Tiling::section_rows`](flamia_sched::work::Tiling)).
/// Not where query heads share keys: items are few and long there, and the longest have to go first.
pub(super) fn backward_rows(shape: &CallShape) -> usize {
    const ROWS: usize = 4096;
    if shape.group() == 1 { ROWS } else { usize::MAX }
}

/// Share of the L2 cache that what the items of a section share may take; what each reads by itself, outputs
/// and the next section's pass through the rest.
const L2_SHARE: usize = 2;

/// Documents of fewer rows on average are taken to be of many lengths.
const SHORT: usize = 1024;

/// Whether documents are taken to be of one length, from their mean.
fn is_even(shape: &CallShape) -> bool {
    shape.mean_document() >= SHORT
}

/// Sections pay where all items cost the same: under the full mask, with documents as long as one another.
/// Elsewhere every section starts with long items again, and one was faster by 7 to 28 % on long causal
/// rows, and by 9 % under the full mask with documents of 500 rows on average beside a long one
/// (bench/LOG.md).
fn pay(shape: &CallShape, mask: Mask) -> bool {
    !mask.is_causal() && is_even(shape)
}

/// All heads in one section, or `cut` into those whose shared bytes fit.
fn sections(
    cut: bool,
    heads: usize,
    group: usize,
    [tokens, bytes_per_row]: [usize; 2],
    l2_bytes: usize,
) -> HeadSections {
    let count = |n| NonZero::new(n).unwrap_or(NonZero::<usize>::MIN);
    let (heads, group) = (count(heads), count(group));
    if cut {
        HeadSections::fitting(heads, group, tokens, bytes_per_row, l2_bytes / L2_SHARE)
    } else {
        HeadSections::whole(heads)
    }
}

/// Those of the forward pass. Under a causal mask too, long rows of long documents are cut: with 65,536 rows, whose
/// keys and values of one head take a third of the L2 cache, one section took 8 to 11 % longer; with 16,384,
/// several did.
pub(super) fn of_forward(shape: &CallShape, mask: Mask, l2_bytes: usize) -> HeadSections {
    let bytes_per_head = shape.tokens * 2 * shape.head_dim;
    let thrashes = is_even(shape) && bytes_per_head > l2_bytes / 4;
    queries(shape, 2, thrashes || pay(shape, mask), l2_bytes)
}

/// Those of query heads, whose items walk keys: `images` of a code per key and feature.
pub(super) fn of_queries(
    shape: &CallShape,
    images: usize,
    mask: Mask,
    l2_bytes: usize,
) -> HeadSections {
    queries(shape, images, pay(shape, mask), l2_bytes)
}

fn queries(shape: &CallShape, images: usize, cut: bool, l2_bytes: usize) -> HeadSections {
    let group = shape.group();
    let bytes_per_row = (images * shape.head_dim).div_ceil(group);
    sections(
        cut,
        shape.heads,
        group,
        [shape.tokens, bytes_per_row],
        l2_bytes,
    )
}

/// Those of key/value heads, whose items walk the queries of a group: `images` of a code per query and
/// feature.
pub(super) fn of_keys(
    shape: &CallShape,
    images: usize,
    mask: Mask,
    l2_bytes: usize,
) -> HeadSections {
    let bytes_per_row = images * shape.head_dim * shape.group();
    let cut = pay(shape, mask);
    sections(
        cut,
        shape.kv_heads,
        1,
        [shape.tokens, bytes_per_row],
        l2_bytes,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_mask_decide_how_heads_are_cut() {
        let shape = CallShape {
            tokens: 16_384,
            documents: 4,
            heads: 16,
            kv_heads: 4,
            head_dim: 128,
        };
        let per_section = |mask| of_queries(&shape, 2, mask, 64 << 20).per_section();
        assert_eq!(per_section(Mask::Causal), 16);
        assert_eq!(per_section(Mask::window(100)), 16);
        // 64 bytes a row and query head: 32 heads would fit half of the cache.
        assert_eq!(per_section(Mask::Full), 16);
        let long = CallShape {
            tokens: 131_072,
            ..shape
        };
        assert_eq!(of_queries(&long, 2, Mask::Full, 64 << 20).per_section(), 4);
        let many = CallShape {
            documents: 129,
            ..long
        };
        assert_eq!(of_queries(&many, 2, Mask::Full, 64 << 20).per_section(), 16);
        // The forward pass's of long documents under a causal mask, where one head takes 32 of 64 MiB.
        assert_eq!(of_forward(&long, Mask::Causal, 64 << 20).per_section(), 4);
        assert_eq!(of_forward(&many, Mask::Causal, 64 << 20).per_section(), 16);
        assert_eq!(of_forward(&shape, Mask::Causal, 64 << 20).per_section(), 16);
        // Four images of four query heads: 2 KiB a row.
        let keys = |shape| of_keys(shape, 4, Mask::Full, 64 << 20);
        assert_eq!(keys(&shape).per_section(), 1);
        let short = CallShape {
            tokens: 8192,
            ..shape
        };
        assert_eq!(keys(&short).per_section(), 2);
        assert_eq!(keys(&short).heads(), 4);
        assert_eq!(of_keys(&long, 4, Mask::Causal, 64 << 20).per_section(), 4);
    }
}
