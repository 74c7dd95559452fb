//! Work lists against what a packed row is by definition.

use std::collections::HashMap;
use std::num::NonZero;

use flamia_sched::work::{
    Acquisition, BackwardCall, BackwardLaunch, HeadSections, Pass, TileCtas, TileCtasRule, Tiling,
    WorkItem, alternating,
};
use flamia_sched::{Documents, Mask, TILE, row_places, tile_bounds};
use proptest::prelude::*;

fn masks() -> impl Strategy<Value = Mask> {
    prop_oneof![
        Just(Mask::Causal),
        Just(Mask::Full),
        (1usize..700).prop_map(Mask::window),
    ]
}

/// Empty documents, single rows, and lengths around tiles and items.
fn lengths() -> impl Strategy<Value = Vec<usize>> {
    let length = prop_oneof![
        2 => Just(0usize),
        2 => Just(1usize),
        3 => 1usize..40,
        3 => prop_oneof![Just(TILE), Just(2 * TILE), Just(3 * TILE)]
            .prop_flat_map(|around| around - 1..around + 2),
        2 => 1usize..1500,
    ];
    prop::collection::vec(length, 0..20)
}

fn tilings() -> impl Strategy<Value = Tiling> {
    let rows = prop_oneof![Just(64usize), Just(128), Just(192), Just(256), 1usize..300];
    (masks(), rows, any::<bool>()).prop_map(|(mask, rows, forward)| {
        let tiling = if forward {
            Tiling::forward(mask)
        } else {
            Tiling::backward(mask)
        };
        tiling.with_item_rows(rows)
    })
}

/// The same in sections of documents: of a few rows, so that there are more than a list has.
fn sectioned_tilings() -> impl Strategy<Value = Tiling> {
    let rows = prop_oneof![Just(usize::MAX), 1usize..20, 1usize..5000];
    (tilings(), rows).prop_map(|(tiling, rows)| tiling.with_section_rows(rows))
}

fn sees(query: usize, key: usize, mask: Mask) -> bool {
    match mask {
        Mask::Causal => key <= query,
        Mask::Full => true,
        Mask::Window(keys) => key <= query && query - key < keys.get(),
    }
}

/// The blocks that an item meets, pair by pair.
fn blocks_met(tiling: Tiling, item: &WorkItem) -> usize {
    let len = item.len as usize;
    let rows = item.first as usize..len.min(item.first as usize + tiling.item_rows);
    let meets = |other: usize| {
        rows.clone().any(|row| match tiling.pass {
            Pass::Forward => sees(row, other, tiling.mask),
            Pass::Backward => sees(other, row, tiling.mask),
        })
    };
    (0..len.div_ceil(TILE))
        .filter(|block| (block * TILE..len.min((block + 1) * TILE)).any(meets))
        .count()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_row_is_in_one_item(lengths in lengths(), tiling in sectioned_tilings()) {
        let documents = Documents::from_lengths(&lengths).unwrap();
        let mut rows = vec![0u8; documents.total()];
        for item in tiling.longest_first(&documents) {
            prop_assert_eq!(
                documents.get(item.document as usize),
                Some(item.start as usize..(item.start + item.len) as usize)
            );
            prop_assert_eq!(item.first as usize % tiling.item_rows, 0);
            let of_document = tiling.rows(&item);
            prop_assert!(!of_document.is_empty() && of_document.end <= item.len as usize);
            for row in of_document {
                rows[item.start as usize + row] += 1;
            }
        }
        prop_assert!(rows.iter().all(|&count| count == 1));
    }

    #[test]
    fn most_work_goes_first_and_ties_keep_the_order_of_the_row(
        lengths in lengths(), tiling in sectioned_tilings(),
    ) {
        let documents = Documents::from_lengths(&lengths).unwrap();
        let keys: Vec<_> = tiling
            .longest_first(&documents)
            .iter()
            .map(|item| {
                let section = (item.start as usize / tiling.section_rows).min(255);
                (section, usize::MAX - tiling.cost(item), item.start + item.first)
            })
            .collect();
        prop_assert!(keys.is_sorted() && keys.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn every_item_and_head_has_one_position(
        items in 0usize..40, heads in 1usize..20, per_section in 1usize..30,
    ) {
        let heads = NonZero::new(heads).unwrap();
        let order = HeadSections::new(heads, NonZero::new(per_section).unwrap());
        let mut seen = vec![0u8; items * heads.get()];
        let mut sections = Vec::new();
        for position in 0..order.positions(items) {
            let (item, head) = order.at(position, items).unwrap();
            seen[item * heads.get() + head] += 1;
            sections.push((head / order.per_section(), item));
        }
        prop_assert!(seen.iter().all(|&count| count == 1));
        prop_assert!(sections.is_sorted(), "sections one after another, items in order inside");
        prop_assert_eq!(order.at(order.positions(items), items), None);
    }

    #[test]
    fn alternating_gives_every_position_once_and_forth_and_back(
        grid in 1usize..50, positions in 0usize..400,
    ) {
        let mut owner = vec![None; positions];
        for cta in 0..grid {
            for position in alternating(grid, cta, positions) {
                prop_assert_eq!(owner[position].replace(cta), None);
            }
        }
        for (position, cta) in owner.into_iter().enumerate() {
            let (round, place) = (position / grid, position % grid);
            let wanted = if round % 2 == 0 { place } else { grid - 1 - place };
            prop_assert_eq!(cta, Some(wanted));
        }
    }

    #[test]
    fn two_backward_launches_do_every_position_once(
        total in 0usize..100_000, heads in 1usize..20, sms in 1usize..200, positions in 0usize..20_000,
    ) {
        let launch = BackwardLaunch::for_row(total, heads, sms);
        let mut done = vec![0u8; positions];
        for count in done.iter_mut().take(launch.grid) {
            *count += 1;
        }
        for cta in 0..launch.overflow {
            for position in launch.overflow_positions(cta, positions) {
                done[position] += 1;
            }
        }
        prop_assert!(done.iter().all(|&count| count == 1));
    }

    #[test]
    fn rows_and_tiles_know_their_documents(lengths in lengths()) {
        let documents = Documents::from_lengths(&lengths).unwrap();
        let places = row_places(&documents);
        prop_assert_eq!(places.len(), documents.total());
        for (row, place) in places.iter().enumerate() {
            let document = documents.get(place.document as usize).unwrap();
            prop_assert!(document.contains(&row));
            prop_assert_eq!(document.start + place.position as usize, row);
            prop_assert_eq!(document, place.start as usize..place.end as usize);
        }
        let bounds = tile_bounds(&places);
        prop_assert_eq!(bounds.len(), documents.total().div_ceil(TILE));
        for (tile, bounds) in bounds.iter().enumerate() {
            let rows = &places[tile * TILE..documents.total().min((tile + 1) * TILE)];
            let column = |value: fn(&flamia_sched::RowPlace) -> i32| rows.iter().map(value);
            prop_assert_eq!(Some(bounds.first_document), column(|place| place.document).min());
            prop_assert_eq!(Some(bounds.last_document), column(|place| place.document).max());
            prop_assert_eq!(Some(bounds.start), column(|place| place.start).min());
            prop_assert_eq!(Some(bounds.end), column(|place| place.end).max());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn cost_counts_the_blocks_that_are_met(lengths in lengths(), tiling in tilings()) {
        let documents = Documents::from_lengths(&lengths).unwrap();
        for item in tiling.items(&documents) {
            prop_assert_eq!(tiling.cost(&item), blocks_met(tiling, &item), "{:?}", item);
        }
    }
}

#[test]
fn a_row_of_single_tokens_keeps_its_order() {
    let documents = Documents::from_lengths(&vec![1; 131_072]).unwrap();
    for tiling in [Tiling::forward(Mask::Causal), Tiling::backward(Mask::Full)] {
        let items = tiling.longest_first(&documents);
        assert_eq!(items.len(), 131_072);
        assert!((0..).zip(&items).all(|(row, item)| *item
            == WorkItem {
                document: row,
                first: 0,
                start: row,
                len: 1
            }));
    }
}

#[test]
fn the_papers_rule_chooses_how_work_is_acquired() {
    let documents = |lengths: &[usize]| Documents::from_lengths(lengths).unwrap();
    let equal = documents(&[4096; 4]);
    let skewed = documents(&[&[8192][..], &[256; 32]].concat());
    let choose = |mask, documents: &Documents| Acquisition::choose(mask, documents);
    assert_eq!(choose(Mask::Causal, &equal), Acquisition::Dynamic);
    assert_eq!(choose(Mask::window(512), &equal), Acquisition::Dynamic);
    assert_eq!(choose(Mask::Full, &equal), Acquisition::Static);
    assert_eq!(choose(Mask::Full, &skewed), Acquisition::Dynamic);
    // Exactly four times the mean counts; empty documents do not lower the mean.
    assert_eq!(
        choose(Mask::Full, &documents(&[400, 50, 50, 50, 50, 50, 50])),
        Acquisition::Dynamic
    );
    assert_eq!(
        choose(Mask::Full, &documents(&[399, 50, 50, 50, 50, 50, 51])),
        Acquisition::Static
    );
    assert_eq!(
        choose(Mask::Full, &documents(&[100, 0, 0, 0, 0, 100])),
        Acquisition::Static
    );
    assert_eq!(choose(Mask::Full, &documents(&[0, 0])), Acquisition::Static);
}

#[test]
fn heads_in_sections_are_acquired_dynamically() {
    let count = |value| NonZero::new(value).unwrap();
    for (per_section, wanted) in [
        (4, Acquisition::Static),
        (9, Acquisition::Static),
        (3, Acquisition::Dynamic),
    ] {
        let order = HeadSections::new(count(4), count(per_section));
        assert_eq!(order.acquisition(Acquisition::Static), wanted);
        assert_eq!(
            order.acquisition(Acquisition::Dynamic),
            Acquisition::Dynamic
        );
    }
}

#[test]
fn sections_hold_what_fits_the_cache_in_whole_groups() {
    let count = |value| NonZero::new(value).unwrap();
    let fitting = |heads, group, total, l2| {
        HeadSections::fitting(count(heads), count(group), total, 1024, l2).per_section()
    };
    let mib = 1 << 20;
    assert_eq!(fitting(16, 1, 16 * 1024, 32 * mib), 2);
    assert_eq!(fitting(16, 4, 1024, 18 * mib), 16);
    assert_eq!(fitting(16, 4, 2048, 18 * mib), 8);
    // Not even a group fits: what fits, and at least one.
    assert_eq!(fitting(16, 4, 16 * 1024, 32 * mib), 2);
    assert_eq!(fitting(16, 4, 1 << 20, 32 * mib), 1);
    assert_eq!(fitting(16, 4, 0, 32 * mib), 16);
}

#[test]
fn long_enough_documents_do_not_overflow_the_first_backward_launch() {
    for (documents, len) in [(1, 16_384), (16, 1024), (128, 512), (7, 513)] {
        let row = Documents::batched(documents, len).unwrap();
        let items = Tiling::backward(Mask::Causal).items(&row).count();
        let launch = BackwardLaunch::for_row(row.total(), 16, 132);
        assert!(16 * items <= launch.grid, "{documents} x {len}");
    }
}

#[test]
fn the_papers_rule_chooses_two_ctas() {
    let long = BackwardCall {
        keys: 32_768,
        heads: 16,
        kv_heads: 4,
        equal_lengths: true,
        deterministic: false,
        supported: true,
    };
    let short = BackwardCall {
        keys: 32_767,
        ..long
    };
    let multi_head = BackwardCall {
        kv_heads: 16,
        ..short
    };
    let cases: HashMap<&str, (BackwardCall, TileCtas)> = HashMap::from([
        ("long", (long, TileCtas::Two)),
        ("short, grouped", (short, TileCtas::One)),
        ("short, multi-head", (multi_head, TileCtas::Two)),
        (
            "cross-attention",
            (
                BackwardCall {
                    equal_lengths: false,
                    ..multi_head
                },
                TileCtas::One,
            ),
        ),
        (
            "deterministic",
            (
                BackwardCall {
                    deterministic: true,
                    ..long
                },
                TileCtas::One,
            ),
        ),
        (
            "unsupported",
            (
                BackwardCall {
                    supported: false,
                    ..long
                },
                TileCtas::One,
            ),
        ),
    ]);
    for (name, (call, wanted)) in cases {
        assert_eq!(TileCtasRule::PAPER.choose(&call), wanted, "{name}");
    }
}
