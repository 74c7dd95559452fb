//! Both passes' tiles against the plain definition of what a query sees.

use std::ops::Range;

use flamia_sched::{
    BLOCK, Documents, KeyTile, Mask, TILE, key_tiles, query_tile_cost, query_tiles,
    query_tiles_for_keys, visible_keys,
};
use proptest::prelude::*;

const MASKS: [Mask; 7] = [
    Mask::Causal,
    Mask::Full,
    Mask::window(1),
    Mask::window(33),
    Mask::window(128),
    Mask::window(200),
    Mask::window(usize::MAX),
];

fn sees(query: usize, key: usize, mask: Mask) -> bool {
    match mask {
        Mask::Causal => key <= query,
        Mask::Full => true,
        Mask::Window(keys) => key <= query && query - key < keys.get(),
    }
}

/// How often the pairs of a document were visited.
struct Visits {
    len: usize,
    count: Vec<u8>,
}

impl Visits {
    fn new(len: usize) -> Self {
        Self {
            len,
            count: vec![0; len * len],
        }
    }

    /// A pass computes a tile's pairs except, if the tile is masked, those that are not visible.
    fn visit(&mut self, queries: Range<usize>, keys: Range<usize>, masked: bool, mask: Mask) {
        let mut hidden = false;
        for query in queries {
            let visible = visible_keys(query, self.len, mask);
            for key in keys.clone() {
                if visible.contains(&key) || !masked {
                    self.count[query * self.len + key] += 1;
                }
                hidden |= !visible.contains(&key);
            }
        }
        assert_eq!(masked, hidden, "masked exactly where something is hidden");
    }

    fn check(&self, mask: Mask) {
        for (pair, &count) in self.count.iter().enumerate() {
            let (query, key) = (pair / self.len, pair % self.len);
            assert_eq!(count, sees(query, key, mask).into(), "({query}, {key})");
        }
    }
}

fn check_document(len: usize) {
    for mask in MASKS {
        let (mut forward, mut backward) = (Visits::new(len), Visits::new(len));
        let mut pairs_of_tiles = Vec::new();
        for queries in query_tiles(len) {
            let tiles: Vec<KeyTile> = key_tiles(len, queries.clone(), mask).collect();
            assert!(tiles.is_sorted_by(|a, b| a.range.start > b.range.start));
            let mut blocks = 0;
            for keys in tiles {
                let first = visible_keys(queries.start, len, mask).start;
                blocks += keys.range.end.div_ceil(BLOCK) - keys.range.start.max(first) / BLOCK;
                forward.visit(queries.clone(), keys.range.clone(), keys.masked, mask);
                pairs_of_tiles.push((keys.range.start, queries.start));
            }
            assert_eq!(query_tile_cost(len, queries, mask), blocks);
        }
        let mut pairs_from_keys = Vec::new();
        for keys in query_tiles(len) {
            let tiles: Vec<_> = query_tiles_for_keys(len, keys.clone(), mask).collect();
            assert!(tiles.is_sorted_by(|a, b| a.range.start < b.range.start));
            for queries in tiles {
                backward.visit(queries.range.clone(), keys.clone(), queries.masked, mask);
                pairs_from_keys.push((keys.start, queries.range.start));
            }
        }
        forward.check(mask);
        backward.check(mask);
        pairs_of_tiles.sort_unstable();
        assert_eq!(pairs_of_tiles, pairs_from_keys);
    }
}

#[test]
fn lengths_around_blocks_and_tiles() {
    for len in [0, 1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 384, 500] {
        check_document(len);
    }
}

#[test]
fn tiles_count_from_the_start_and_hold_whole_blocks() {
    assert_eq!(TILE % BLOCK, 0);
    assert!(query_tiles(300).eq([0..128, 128..256, 256..300]));
    assert_eq!(query_tiles(300).len(), 3);
    assert_eq!(query_tiles(0).len(), 0);
    assert!(query_tiles(129).eq([0..128, 128..129]));
}

#[test]
fn the_diagonal_comes_first_and_alone_is_masked() {
    let tiles: Vec<_> = key_tiles(300, 256..300, Mask::Causal).collect();
    assert_eq!(
        tiles,
        [(256..300, true), (128..256, false), (0..128, false)]
            .map(|(range, masked)| KeyTile { range, masked })
    );
    // A tile of one row sees all of its own tile.
    assert!(key_tiles(129, 128..129, Mask::Causal).all(|tile| !tile.masked));
    assert!(key_tiles(300, 0..128, Mask::Full).all(|tile| !tile.masked));
}

#[test]
fn cost_counts_key_blocks() {
    assert_eq!(query_tile_cost(300, 0..128, Mask::Causal), 4);
    assert_eq!(query_tile_cost(300, 256..300, Mask::Causal), 10);
    assert_eq!(query_tile_cost(300, 0..128, Mask::Full), 10);
}

#[test]
fn nothing_is_visited_for_no_rows() {
    for mask in MASKS {
        assert_eq!(key_tiles(300, 128..128, mask).len(), 0);
        assert_eq!(query_tiles_for_keys(300, 128..128, mask).len(), 0);
        assert_eq!(query_tile_cost(300, 128..128, mask), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_visible_pair_is_visited_once_by_each_pass(len in 0usize..700) {
        check_document(len);
    }

    /// The whole packed row: a query sees the keys of its own document and no others.
    #[test]
    fn no_tile_crosses_a_document(lengths in prop::collection::vec(prop_oneof![Just(0usize), Just(1), 0usize..200], 1..6)) {
        let documents = Documents::from_lengths(&lengths).unwrap();
        let (ids, total) = (documents.document_ids(), documents.total());
        for mask in MASKS {
            let mut count = vec![0u8; total * total];
            for document in documents.iter() {
                for queries in query_tiles(document.len()) {
                    for tile in key_tiles(document.len(), queries.clone(), mask) {
                        for query in queries.clone() {
                            let visible = visible_keys(query, document.len(), mask);
                            for key in tile.range.clone().filter(|key| visible.contains(key)) {
                                count[(document.start + query) * total + document.start + key] += 1;
                            }
                        }
                    }
                }
            }
            for (pair, &count) in count.iter().enumerate() {
                let (query, key) = (pair / total, pair % total);
                let expected = ids[query] == ids[key] && sees(query, key, mask);
                prop_assert_eq!(count, expected.into(), "({}, {})", query, key);
            }
            let pairs: u64 = count.into_iter().map(u64::from).sum();
            prop_assert_eq!(documents.visible_pairs(mask), pairs);
        }
    }

    /// Tiles of another size or place cover what they should, too.
    #[test]
    fn any_run_of_queries_is_covered(len in 1usize..400, ends in any::<[prop::sample::Index; 2]>()) {
        let [a, b] = ends.map(|end| end.index(len + 1));
        let run = a.min(b)..a.max(b);
        for mask in MASKS {
            let mut visits = Visits::new(len);
            for keys in key_tiles(len, run.clone(), mask) {
                visits.visit(run.clone(), keys.range, keys.masked, mask);
            }
            for (pair, &count) in visits.count.iter().enumerate() {
                let (query, key) = (pair / len, pair % len);
                let expected = run.contains(&query) && sees(query, key, mask);
                prop_assert_eq!(count, expected.into());
            }
        }
    }
}
