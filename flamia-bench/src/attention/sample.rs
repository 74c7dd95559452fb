//! The part of a packed row that the CPU computes as well before anything is timed.

use std::ops::Range;

use flamia_sched::{Documents, TILE};

use super::row::Masking;

/// Rows of the packed row, each range the beginning of a document or all of it, for a CPU that has
/// time for this many query-key pairs of one head: the longest document that it has time for, then the
/// first others as long as a quarter of the time is enough for all. Under a causal mask a document may
/// be cut, since its first rows do not see the others.
pub fn sample(documents: &Documents, mask: Masking, pairs: usize) -> Vec<Range<usize>> {
    let most = pairs.isqrt();
    let piece = |rows: Range<usize>| match mask {
        Masking::Causal => {
            let cut = (2 * pairs).isqrt() / TILE * TILE;
            rows.start..rows.end.min(rows.start + cut)
        }
        Masking::Full if rows.len() <= most => rows,
        Masking::Full => rows.start..rows.start,
    };
    let cost = |piece: &Range<usize>| match mask {
        Masking::Causal => piece.len() * piece.len().div_ceil(2),
        Masking::Full => piece.len() * piece.len(),
    };
    let pieces = documents.iter().map(piece);
    let pieces: Vec<_> = pieces.filter(|piece| !piece.is_empty()).collect();
    let Some(longest) = pieces.iter().max_by_key(|piece| piece.len()) else {
        return Vec::new();
    };
    let mut spent = cost(longest);
    let mut chosen = vec![longest.clone()];
    for piece in pieces.iter().filter(|piece| *piece != longest) {
        spent += cost(piece);
        if spent > pairs / 4 {
            break;
        }
        chosen.push(piece.clone());
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::super::workload::{Shape, shapes};
    use super::*;

    fn of(name: &str, mask: Masking, pairs: usize) -> Vec<Range<usize>> {
        sample(&Shape::named(name).unwrap().documents(), mask, pairs)
    }

    #[test]
    fn long_documents_are_cut_under_a_causal_mask_alone() {
        let (causal, full) = (Masking::Causal, Masking::Full);
        let rows = |mask, pairs| {
            let pieces = of("1x16384", mask, pairs).into_iter();
            pieces
                .map(|rows| (rows.start, rows.end))
                .collect::<Vec<_>>()
        };
        assert_eq!(rows(causal, 1 << 24), [(0, 5760)]);
        assert_eq!(rows(causal, 1 << 28), [(0, 16384)]);
        assert_eq!(rows(full, 1 << 28), [(0, 16384)]);
        assert_eq!(rows(full, 1 << 24), []);
        // The first of those that there is time for.
        let skewed = of("8192+32x256", full, 1 << 20);
        assert_eq!(skewed.len(), 4);
        assert!(
            skewed
                .iter()
                .all(|piece| piece.len() == 256 && piece.start >= 8192)
        );
        assert_eq!(of("8192+32x256", causal, 1 << 28).len(), 33);
    }

    #[test]
    fn the_time_is_kept_and_nothing_chosen_twice() {
        for shape in shapes() {
            let documents = shape.documents();
            for (mask, seen) in [(Masking::Causal, 2), (Masking::Full, 1)] {
                for pairs in [1 << 20, 1 << 24, 1 << 30] {
                    let pieces = sample(&documents, mask, pairs);
                    for (index, piece) in pieces.iter().enumerate() {
                        assert!(piece.len() <= pieces[0].len());
                        assert!(documents.iter().any(|rows| rows.start == piece.start
                            && (rows.end == piece.end || mask == Masking::Causal)));
                        assert!(pieces[..index].iter().all(|other| other != piece));
                    }
                    let found: usize = pieces.iter().map(|piece| piece.len().pow(2) / seen).sum();
                    assert!(found <= pairs, "{found} for {pairs} on {}", shape.name);
                }
                let all = sample(&documents, mask, 1 << 30);
                assert_eq!(all[0].len(), documents.longest());
            }
        }
    }
}
