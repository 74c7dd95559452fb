//! Document boundaries: what is accepted, what is refused and how (PCK-04), and what follows from
//! them (BEN-01, PCK-08).

use flamia_sched::{Documents, DocumentsError, Mask};
use proptest::prelude::*;

#[test]
fn boundaries_are_kept() {
    let documents = Documents::from_cu_seqlens(&[0, 0, 3, 3, 4, 9, 9], 9).unwrap();
    assert_eq!(documents.cu_seqlens(), [0, 0, 3, 3, 4, 9, 9]);
    assert_eq!((documents.len(), documents.total()), (6, 9));
    assert_eq!(documents.longest(), 5);
    assert!(!documents.is_empty());
    assert_eq!(documents.get(1), Some(0..3));
    assert_eq!(documents.get(5), Some(9..9));
    assert_eq!(documents.get(6), None);
    assert!(documents.iter().eq([0..0, 0..3, 3..3, 3..4, 4..9, 9..9]));
    assert_eq!(documents.iter().len(), 6);
    assert_eq!(documents.position_ids(), [0, 1, 2, 0, 0, 1, 2, 3, 4]);
    assert_eq!(documents.document_ids(), [1, 1, 1, 3, 4, 4, 4, 4, 4]);
    assert_eq!(Documents::from_lengths(&[0, 3, 0, 1, 5, 0]), Ok(documents));
}

#[test]
fn other_ways_to_describe_a_row() {
    assert_eq!(Documents::single(5).unwrap().cu_seqlens(), [0, 5]);
    assert_eq!(Documents::single(0).unwrap().cu_seqlens(), [0, 0]);
    assert_eq!(
        Documents::batched(3, 4).unwrap().cu_seqlens(),
        [0, 4, 8, 12]
    );
    assert_eq!(Documents::batched(2, 0).unwrap().cu_seqlens(), [0, 0, 0]);
    let rows = [
        Documents::from_lengths(&[2, 0]).unwrap(),
        Documents::from_lengths(&[]).unwrap(),
        Documents::from_lengths(&[1, 3]).unwrap(),
    ];
    assert_eq!(
        Documents::concat(&rows).unwrap().cu_seqlens(),
        [0, 2, 2, 3, 6]
    );
    for none in [
        Documents::from_lengths(&[]).unwrap(),
        Documents::batched(0, 7).unwrap(),
        Documents::concat(&[]).unwrap(),
    ] {
        assert!(none.is_empty());
        assert_eq!((none.len(), none.total(), none.longest()), (0, 0, 0));
        assert_eq!(none.get(0), None);
    }
}

/// PCK-04: each malformed row is refused, naming the entry, its value and what to do.
#[test]
fn pck_04_malformed_boundaries_are_refused() {
    use DocumentsError::*;
    let too_long = i32::MAX as usize + 1;
    for (cu_seqlens, total, error, hints) in [
        (
            &[1, 8, 16][..],
            16,
            Start { value: 1 },
            &["[0] is 1", "row 0"][..],
        ),
        (&[-3, 16], 16, Start { value: -3 }, &["[0] is -3"]),
        (&[16], 16, Start { value: 16 }, &["put a 0 in front"]),
        (
            &[0, 8, 12],
            16,
            End {
                index: 2,
                value: 12,
                total: 16,
            },
            &["[2]", "12", "16 rows", "padding"],
        ),
        (
            &[0, 10, 6, 16],
            16,
            Decreasing {
                index: 2,
                value: 6,
                previous: 10,
            },
            &["[2] is 6", "[1] = 10", "sort"],
        ),
        (
            &[0, 4, -4, 16],
            16,
            Negative {
                index: 2,
                value: -4,
            },
            &["[2] is -4", "negative"],
        ),
        (
            &[0, 20, 16],
            16,
            PastEnd {
                index: 1,
                value: 20,
                total: 16,
            },
            &["[1] is 20", "16 rows"],
        ),
        (
            &[0, i64::MAX],
            16,
            PastEnd {
                index: 1,
                value: i64::MAX,
                total: 16,
            },
            &["[1]"],
        ),
        (
            &[0, 1 << 32],
            0,
            PastEnd {
                index: 1,
                value: 1 << 32,
                total: 0,
            },
            &["4294967296"],
        ),
        (
            &[0],
            16,
            TooShort {
                entries: 1,
                total: 16,
            },
            &["length 1,", "[0, 16]"],
        ),
        (
            &[0],
            0,
            TooShort {
                entries: 1,
                total: 0,
            },
            &["[0, 0]"],
        ),
        (
            &[],
            16,
            TooShort {
                entries: 0,
                total: 16,
            },
            &["length 0,"],
        ),
        (
            &[0, too_long as i64],
            too_long,
            TooManyRows { total: too_long },
            &["2147483648", "2147483647", "split"],
        ),
    ] {
        let found = Documents::from_cu_seqlens(cu_seqlens, total).unwrap_err();
        assert_eq!(found, error, "{cu_seqlens:?}");
        let message = found.to_string();
        for hint in hints {
            assert!(message.contains(hint), "`{message}` lacks `{hint}`");
        }
    }
}

/// PCK-04: the longest document cannot be misstated, because it is never stated.
#[test]
fn pck_04_the_longest_document_is_computed() {
    let documents = Documents::from_cu_seqlens(&[0, 2, 12, 16], 16).unwrap();
    assert_eq!(documents.longest(), 10);
}

#[test]
fn rows_end_where_32_bit_boundaries_do() {
    let max = i32::MAX as usize;
    assert_eq!(Documents::single(max).unwrap().total(), max);
    assert_eq!(
        Documents::from_cu_seqlens(&[0, max as i64], max)
            .unwrap()
            .cu_seqlens(),
        [0, i32::MAX]
    );
    let full = Documents::single(max).unwrap();
    assert_eq!(full.visible_pairs(Mask::Full), (max as u64).pow(2));

    for (error, total) in [
        (Documents::single(max + 1), max + 1),
        (Documents::batched(2, max), 2 * max),
        (Documents::batched(usize::MAX, 2), usize::MAX),
        (Documents::from_lengths(&[5, max, usize::MAX]), max + 5),
        (Documents::from_lengths(&[5, usize::MAX]), usize::MAX),
        (Documents::concat(&[full.clone(), full]), 2 * max),
    ] {
        assert_eq!(error, Err(DocumentsError::TooManyRows { total }));
    }
    let error = Documents::batched(usize::MAX, 0).unwrap_err();
    assert_eq!(
        error,
        DocumentsError::TooManyDocuments { count: usize::MAX }
    );
}

/// BEN-01: pairs are counted per document and halved by causality.
#[test]
fn ben_01_visible_pairs() {
    for (batch, len, pairs, forward_flops) in [
        (1, 8192, 33_558_528, 17_181_966_336),
        (8, 1024, 4_198_400, 2_149_580_800),
        (8192, 1, 8192, 4_194_304),
    ] {
        let documents = Documents::batched(batch, len).unwrap();
        assert_eq!(documents.visible_pairs(Mask::Causal), pairs);
        assert_eq!(
            4 * 128 * documents.visible_pairs(Mask::Causal),
            forward_flops
        );
        assert_eq!(
            documents.visible_pairs(Mask::Full),
            (batch * len * len) as u64
        );
    }
}

#[test]
fn a_hundred_thousand_documents() {
    let lengths: Vec<usize> = (0..100_000).map(|i| i * 7 % 5).collect();
    let documents = Documents::from_lengths(&lengths).unwrap();
    assert_eq!(documents.len(), 100_000);
    assert_eq!(documents.total(), 200_000);
    assert_eq!(documents.longest(), 4);
    assert!(
        documents
            .iter()
            .map(|d| d.len())
            .eq(lengths.iter().copied())
    );
    assert_eq!(
        documents.visible_pairs(Mask::Causal),
        20_000 * (1 + 3 + 6 + 10)
    );
    let boundaries: Vec<i64> = documents.cu_seqlens().iter().map(|&b| b.into()).collect();
    assert_eq!(
        Documents::from_cu_seqlens(&boundaries, 200_000),
        Ok(documents)
    );
}

/// The index of the first entry that no valid row of `total` rows could have at its place.
fn first_bad_entry(cu_seqlens: &[i64], total: i64) -> Option<usize> {
    (0..cu_seqlens.len()).find(|&i| {
        let value = cu_seqlens[i];
        let lowest = if i == 0 { 0 } else { cu_seqlens[i - 1] };
        let highest = if i == 0 { 0 } else { total };
        let last = i == cu_seqlens.len() - 1;
        !(lowest..=highest).contains(&value) || last && value != total
    })
}

fn bad_index(error: &DocumentsError) -> usize {
    match *error {
        DocumentsError::Start { .. } => 0,
        DocumentsError::Negative { index, .. }
        | DocumentsError::Decreasing { index, .. }
        | DocumentsError::PastEnd { index, .. }
        | DocumentsError::End { index, .. } => index,
        ref other => panic!("{other}"),
    }
}

/// Documents as they come: empty ones, single tokens, long ones.
fn lengths() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![Just(0usize), Just(1), 0usize..300], 1..20)
}

proptest! {
    #[test]
    fn valid_boundaries_round_trip(lengths in lengths()) {
        let documents = Documents::from_lengths(&lengths).unwrap();
        let boundaries: Vec<i64> = documents.cu_seqlens().iter().map(|&b| b.into()).collect();
        let again = Documents::from_cu_seqlens(&boundaries, lengths.iter().sum()).unwrap();
        prop_assert_eq!(&again, &documents);
        prop_assert_eq!(documents.longest(), lengths.iter().copied().max().unwrap());
        prop_assert!(again.iter().map(|d| d.len()).eq(lengths.iter().copied()));
        for (index, document) in documents.iter().enumerate() {
            prop_assert_eq!(documents.get(index), Some(document));
        }
        prop_assert_eq!(documents.get(lengths.len()), None);
    }

    #[test]
    fn ids_are_those_of_each_row(lengths in lengths()) {
        let documents = Documents::from_lengths(&lengths).unwrap();
        let (positions, ids) = (documents.position_ids(), documents.document_ids());
        prop_assert_eq!(positions.len(), documents.total());
        prop_assert_eq!(ids.len(), documents.total());
        for (row, (position, id)) in positions.into_iter().zip(ids).enumerate() {
            let document = documents.get(id as usize).unwrap();
            prop_assert!(document.contains(&row));
            prop_assert_eq!(document.start + position as usize, row);
        }
    }

    #[test]
    fn a_broken_entry_is_found(lengths in lengths(), at in any::<prop::sample::Index>(), value in prop_oneof![
        any::<i64>(), -5i64..3000, Just(i64::from(i32::MAX) + 1), Just(i64::MIN),
    ]) {
        let mut boundaries: Vec<i64> = vec![0];
        for length in lengths {
            boundaries.push(boundaries.last().unwrap() + length as i64);
        }
        let total = *boundaries.last().unwrap();
        *at.get_mut(&mut boundaries) = value;
        let found = Documents::from_cu_seqlens(&boundaries, total as usize);
        match first_bad_entry(&boundaries, total) {
            None => prop_assert!(found.is_ok()),
            Some(index) => {
                let error = found.unwrap_err();
                prop_assert_eq!(bad_index(&error), index);
                let value = boundaries[index].to_string();
                prop_assert!(error.to_string().contains(&value), "{error} lacks {value}");
            }
        }
    }

    #[test]
    fn noise_never_panics(boundaries in prop::collection::vec(prop_oneof![any::<i64>(), -2i64..9], 2..6), total in prop_oneof![0usize..9, any::<usize>()]) {
        let found = Documents::from_cu_seqlens(&boundaries, total);
        match i32::try_from(total) {
            Err(_) => prop_assert_eq!(found, Err(DocumentsError::TooManyRows { total })),
            Ok(_) => match first_bad_entry(&boundaries, total as i64) {
                None => prop_assert!(found.is_ok()),
                Some(index) => prop_assert_eq!(bad_index(&found.unwrap_err()), index),
            },
        }
    }
}
