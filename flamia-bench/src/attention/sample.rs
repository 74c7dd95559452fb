//! The part of a packed row that the CPU computes as well before anything is timed.

use std::ops::Range;

use flamia_sched::Documents;

use super::row::Masking;

/// Query-key pairs of one head that the CPU has time for.
const PAIRS: usize = 1 << 25;

/// Rows that are computed of a document under a causal mask, whose first rows do not see the others.
const FIRST_ROWS: usize = 4096;

/// Rows of the packed row, each range the beginning of a document or all of it: the longest document,
/// then the first ones, as many as there is time for. Under a full mask all of the longest document
/// whatever it takes, since every row of it sees every other.
pub fn sample(documents: &Documents, mask: Masking) -> Vec<Range<usize>> {
    let piece = |rows: Range<usize>| match mask {
        Masking::Causal => rows.start..rows.end.min(rows.start + FIRST_ROWS),
        Masking::Full => rows,
    };
    let longest = documents.iter().max_by_key(|rows| rows.len());
    let mut pairs = 0;
    let mut pieces = Vec::new();
    let others = documents
        .iter()
        .filter(|rows| longest.as_ref() != Some(rows));
    for rows in longest.clone().into_iter().chain(others) {
        let piece = piece(rows);
        let more = piece.len().pow(2);
        if !pieces.is_empty() && pairs + more > PAIRS {
            break;
        }
        pairs += more;
        pieces.push(piece);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::super::workload::{Shape, shapes};
    use super::*;

    fn of(name: &str, mask: Masking) -> Vec<Range<usize>> {
        sample(&Shape::named(name).unwrap().documents(), mask)
    }

    #[test]
    fn long_documents_are_cut_under_a_causal_mask_alone() {
        assert_eq!(of("1x16384", Masking::Causal), [0..4096]);
        assert_eq!(of("1x16384", Masking::Full), [0..16384]);
        let skewed = of("8192+32x256", Masking::Causal);
        assert_eq!(skewed[..2], [0..4096, 8192..8448]);
        assert_eq!(skewed.len(), 33);
    }

    #[test]
    fn the_longest_is_there_and_nothing_twice() {
        for shape in shapes() {
            let documents = shape.documents();
            for mask in [Masking::Causal, Masking::Full] {
                let pieces = sample(&documents, mask);
                let longest = documents.iter().max_by_key(|rows| rows.len()).unwrap();
                assert_eq!(pieces[0].start, longest.start);
                for (index, piece) in pieces.iter().enumerate() {
                    assert!(documents.iter().any(|rows| rows.start == piece.start));
                    assert!(pieces[..index].iter().all(|other| other != piece));
                }
                let pairs: usize = pieces[1..].iter().map(|piece| piece.len().pow(2)).sum();
                assert!(pairs <= PAIRS);
            }
        }
    }
}
