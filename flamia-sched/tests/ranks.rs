//! Sharing rows among ranks against every possible way to do so.

use std::num::NonZero;

use flamia_sched::ranks::{Balance, StepTime, UnevenRows, share, visited_blocks};
use flamia_sched::{Documents, Mask, TILE, visible_keys};
use proptest::prelude::*;

fn count(n: usize) -> NonZero<usize> {
    NonZero::new(n).unwrap()
}

/// The least time of the slowest rank over all ways to give every rank `room` rows.
fn optimum(times: &[f64], loads: &mut [f64], room: &mut [usize]) -> f64 {
    let Some((first, rest)) = times.split_first() else {
        return loads.iter().copied().fold(0.0, f64::max);
    };
    let mut best = f64::INFINITY;
    for rank in 0..loads.len() {
        if room[rank] > 0 {
            (loads[rank], room[rank]) = (loads[rank] + first, room[rank] - 1);
            best = best.min(optimum(rest, loads, room));
            (loads[rank], room[rank]) = (loads[rank] - first, room[rank] + 1);
        }
    }
    best
}

proptest! {
    #[test]
    fn every_row_goes_to_one_rank_and_every_rank_gets_as_many(
        rows in 0..8usize,
        ranks in 1..9usize,
        seed in prop::collection::vec(0.0..100.0f64, 64),
    ) {
        let times = &seed[..rows * ranks];
        for balance in Balance::ALL {
            let shares = share(times, count(ranks), balance).unwrap();
            prop_assert_eq!(shares.rows.len(), ranks);
            prop_assert!(shares.rows.iter().all(|of_rank| of_rank.len() == rows));
            let mut all: Vec<_> = shares.rows.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..times.len()).collect::<Vec<_>>());
            for (of_rank, load) in shares.rows.iter().zip(&shares.loads) {
                let time: f64 = of_rank.iter().map(|&row| times[row]).sum();
                prop_assert!((time - load).abs() < 1e-9);
            }
            prop_assert!(shares.max_over_mean() >= 1.0 - 1e-9);
            prop_assert_eq!(&share(times, count(ranks), balance).unwrap(), &shares);
        }
        let longest = |balance| share(times, count(ranks), balance).unwrap().longest();
        prop_assert!(longest(Balance::Refined) <= longest(Balance::Greedy));
    }

    #[test]
    fn refined_is_close_to_the_best_there_is(
        (ranks, times) in prop::sample::select(vec![(2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2)])
            .prop_flat_map(|(ranks, rows): (usize, usize)| {
                let time = prop_oneof![1.0..10.0f64, 1.0..100.0f64];
                (Just(ranks), prop::collection::vec(time, ranks * rows))
            }),
    ) {
        let rows = times.len() / ranks;
        let best = optimum(&times, &mut vec![0.0; ranks], &mut vec![rows; ranks]);
        for balance in Balance::ALL {
            let longest = share(&times, count(ranks), balance).unwrap().longest();
            prop_assert!(best <= longest * (1.0 + 1e-9), "{balance:?}");
            if balance == Balance::Refined {
                prop_assert!(longest <= 1.2 * best, "{longest} against {best}: {times:?}");
            }
        }
    }

    #[test]
    fn visited_blocks_are_the_tile_pairs_with_something_to_see(
        lengths in prop::collection::vec(0..700usize, 0..5),
        mask in prop_oneof![
            Just(Mask::Causal),
            Just(Mask::Full),
            (1..400usize).prop_map(Mask::window),
        ],
    ) {
        let mut pairs = 0;
        for &len in &lengths {
            for query_tile in 0..len.div_ceil(TILE) {
                for key_tile in 0..len.div_ceil(TILE) {
                    let seen = (query_tile * TILE..len.min((query_tile + 1) * TILE)).any(|query| {
                        let keys = visible_keys(query, len, mask);
                        keys.start < (key_tile + 1) * TILE && keys.end > key_tile * TILE
                    });
                    pairs += usize::from(seen);
                }
            }
        }
        let row = Documents::from_lengths(&lengths).unwrap();
        prop_assert_eq!(visited_blocks(&row, mask), pairs);
        let model = StepTime { per_token: 0.5, per_block: 3.0 };
        prop_assert_eq!(model.of(&row, mask), 0.5 * row.total() as f64 + 3.0 * pairs as f64);
    }
}

/// Worked out by hand; no way is better than 21 and 20.
#[test]
fn the_policies_do_what_they_say() {
    let times = [8.0, 5.0, 1.0, 7.0, 9.0, 11.0];
    let shares = |balance| share(&times, count(2), balance).unwrap();
    let as_they_come = shares(Balance::AsTheyCome);
    assert_eq!(as_they_come.rows, [[0, 2, 4], [1, 3, 5]]);
    assert_eq!(as_they_come.loads, [18.0, 23.0]);
    // 11 | 9 8 | 7 5 | 1.
    let snake = shares(Balance::Snake);
    assert_eq!(snake.rows, [[1, 3, 5], [0, 2, 4]]);
    assert_eq!(snake.loads, [23.0, 18.0]);
    // The second rank is full when the last row comes.
    let greedy = shares(Balance::Greedy);
    assert_eq!(greedy.rows, [[2, 3, 5], [0, 1, 4]]);
    assert_eq!(greedy.loads, [19.0, 22.0]);
    // The 9 for the 7.
    let refined = shares(Balance::Refined);
    assert_eq!(refined.rows, [[2, 4, 5], [0, 1, 3]]);
    assert_eq!(refined.loads, [21.0, 20.0]);
    assert_eq!(refined.max_over_mean(), 21.0 / 20.5);
}

#[test]
fn rows_that_do_not_divide_are_refused() {
    let error = share(&[1.0; 10], count(4), Balance::Greedy).unwrap_err();
    assert_eq!(error, UnevenRows { rows: 10, ranks: 4 });
    assert!(error.to_string().contains("use 8 or 12 rows"), "{error}");
}
