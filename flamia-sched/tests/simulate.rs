//! Simulated schedules against slower and simpler simulations, every possible assignment, and
//! numbers worked out elsewhere.

use std::collections::HashSet;
use std::num::NonZero;

use flamia_sched::simulate::{Assignment, Cost, Order, Policy, Request, Timeline, simulate};
use flamia_sched::work::{BackwardLaunch, HeadSections, Pass, Tiling};
use flamia_sched::workloads::{WORKLOADS, Workload};
use flamia_sched::{Documents, Mask};
use proptest::prelude::*;

const ORDERS: [Order; 3] = [
    Order::Input,
    Order::LongestFirstInDocuments,
    Order::LongestFirst,
];

fn count(n: usize) -> NonZero<usize> {
    NonZero::new(n).unwrap()
}

fn sections(heads: usize, per_section: usize) -> HeadSections {
    HeadSections::new(count(heads), count(per_section))
}

fn assignments() -> impl Strategy<Value = Assignment> {
    let request = prop_oneof![
        Just(Request::AtStart),
        (0..6u32).prop_map(|lead| Request::BeforeEnd(f64::from(lead))),
    ];
    let dynamic = (request, 0..4u32).prop_map(|(request, latency)| Assignment::Dynamic {
        request,
        latency: f64::from(latency),
    });
    let launches = (0..40usize, 1..12usize)
        .prop_map(|(grid, overflow)| Assignment::Launches(BackwardLaunch { grid, overflow }));
    prop_oneof![
        Just(Assignment::Strided),
        Just(Assignment::Alternating),
        dynamic,
        launches
    ]
}

fn tilings() -> impl Strategy<Value = Tiling> {
    let masks = prop_oneof![
        Just(Mask::Causal),
        Just(Mask::Full),
        (1..700usize).prop_map(Mask::window),
    ];
    let passes = prop_oneof![Just(Pass::Forward), Just(Pass::Backward)];
    let rows = prop_oneof![Just(128usize), Just(256), 1..400usize];
    let sections = prop_oneof![Just(usize::MAX), 1..2000usize];
    (passes, masks, rows, sections).prop_map(|(pass, mask, item_rows, section_rows)| Tiling {
        pass,
        mask,
        item_rows,
        section_rows,
    })
}

prop_compose! {
    fn policies()(
        order in prop::sample::select(&ORDERS[..]),
        heads in 1..5usize,
        per_section in 1..5usize,
        assignment in assignments(),
    ) -> Policy {
        Policy { order, sections: sections(heads, per_section), assignment }
    }
}

/// One tick of time at a time, one CTA at a time: whole numbers only.
fn tick_by_tick(durations: &[u64], assignment: Assignment, ctas: usize) -> Vec<(usize, u64, u64)> {
    #[derive(Clone, Default)]
    struct Cta {
        /// Positions that it will do, in order, and when it may start them.
        queue: std::collections::VecDeque<(usize, u64)>,
        busy_until: u64,
        asks: Option<u64>,
    }
    let mut all = vec![Cta::default(); ctas];
    let mut next = 0;
    let (mut request, mut latency) = (None, 0);
    match assignment {
        Assignment::Strided => {
            for position in 0..durations.len() {
                all[position % ctas].queue.push_back((position, 0));
            }
        }
        Assignment::Alternating => {
            for position in 0..durations.len() {
                let place = position % ctas;
                let backwards = position / ctas % 2 == 1;
                let cta = if backwards { ctas - 1 - place } else { place };
                all[cta].queue.push_back((position, 0));
            }
        }
        Assignment::Dynamic {
            request: when,
            latency: wait,
        } => {
            for cta in all.iter_mut().take(durations.len()) {
                cta.queue.push_back((next, 0));
                next += 1;
            }
            (request, latency) = (Some(when), wait as u64);
        }
        Assignment::Launches(_) => unreachable!("has its own simulation"),
    }
    let mut done = Vec::new();
    for now in 0.. {
        for cta in &mut all {
            // It asks as its item ends, starts what it got, and may ask again at once.
            for _ in 0..2 {
                if cta.asks == Some(now) && next < durations.len() {
                    cta.queue.push_back((next, now + latency));
                    cta.asks = None;
                    next += 1;
                }
                let ready = cta.queue.front().is_some_and(|&(_, from)| from <= now);
                if ready && cta.busy_until <= now {
                    let (position, _) = cta.queue.pop_front().unwrap();
                    let end = now + durations[position];
                    done.push((position, now, end));
                    cta.busy_until = end;
                    cta.asks = request.map(|request| match request {
                        Request::AtStart => now,
                        Request::BeforeEnd(lead) => end.saturating_sub(lead as u64).max(now),
                    });
                }
            }
        }
        if done.len() == durations.len() {
            return done;
        }
    }
    unreachable!()
}

/// The same for the two launches of the backward pass.
fn tick_by_tick_launches(
    durations: &[u64],
    launch: BackwardLaunch,
    ctas: usize,
) -> Vec<(usize, u64, u64)> {
    let mut grids = [Vec::new(), vec![Vec::new(); launch.overflow]];
    for position in 0..durations.len() {
        match position.checked_sub(launch.grid) {
            None => grids[0].push(vec![position]),
            Some(over) => grids[1][over % launch.overflow].push(position),
        }
    }
    let mut done = Vec::new();
    let mut from = 0;
    for grid in grids {
        let mut waiting = grid.into_iter();
        let mut free_at = vec![from; ctas];
        let mut now = from;
        while waiting.len() > 0 {
            for free in &mut free_at {
                if *free <= now {
                    // A CTA without positions leaves the lane free for the next one.
                    for positions in waiting.by_ref() {
                        for position in positions {
                            let end = *free + durations[position];
                            done.push((position, *free, end));
                            *free = end;
                        }
                        if *free > now {
                            break;
                        }
                    }
                }
                *free = (*free).max(now);
            }
            now += 1;
        }
        from = done.iter().map(|span| span.2).max().unwrap_or(0).max(from);
    }
    done
}

fn durations(timeline: &Timeline) -> Vec<u64> {
    let mut spans: Vec<_> = timeline.lanes().iter().flatten().collect();
    spans.sort_by_key(|span| span.position);
    spans.iter().map(|s| (s.end - s.start) as u64).collect()
}

/// The least makespan of any assignment whatever.
fn optimum(durations: &[u64], loads: &mut [u64]) -> u64 {
    let Some((first, rest)) = durations.split_first() else {
        return loads.iter().copied().max().unwrap_or(0);
    };
    (0..loads.len())
        .map(|cta| {
            loads[cta] += first;
            let best = optimum(rest, loads);
            loads[cta] -= first;
            best
        })
        .min()
        .unwrap()
}

proptest! {
    #[test]
    fn every_item_of_every_head_is_done_once_and_no_cta_does_two_at_a_time(
        lengths in prop::collection::vec(0..1500usize, 0..20),
        tiling in tilings(),
        policy in policies(),
        ctas in 1..40usize,
        (per_block, per_item) in (0.0..3.0f64, 0.0..5.0f64),
    ) {
        let documents = Documents::from_lengths(&lengths).unwrap();
        let cost = Cost { per_block, per_item };
        let timeline = simulate(&documents, &tiling, &policy, &cost, count(ctas));
        prop_assert_eq!(timeline.lanes().len(), ctas);

        let mut expected = HashSet::new();
        for (document, &len) in lengths.iter().enumerate() {
            for first in (0..len).step_by(tiling.item_rows) {
                for head in 0..policy.sections.heads() {
                    expected.insert((document as i32, first as i32, head));
                }
            }
        }
        let mut total = 0.0;
        let mut longest = 0.0f64;
        for lane in timeline.lanes() {
            for span in lane {
                let known = expected.remove(&(span.item.document, span.item.first, span.head));
                prop_assert!(known, "{:?} twice or never asked for", span);
                let time = per_item + per_block * tiling.cost(&span.item) as f64;
                prop_assert!((span.end - span.start - time).abs() < 1e-6);
                total += time;
                longest = longest.max(time);
            }
            prop_assert!(lane.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
        prop_assert!(expected.is_empty(), "never done: {expected:?}");

        let bound = longest.max(total / ctas as f64);
        prop_assert!((timeline.bound() - bound).abs() <= 1e-6 * bound);
        let makespan = timeline.makespan();
        prop_assert!(makespan >= bound * (1.0 - 1e-9));
        prop_assert!((makespan - timeline.ratio() * timeline.bound()).abs() <= 1e-6 * makespan);
        let idle = makespan * ctas as f64 * timeline.idle_share();
        prop_assert!((makespan * ctas as f64 - total - idle).abs() <= 1e-6 * makespan.max(1.0));
    }

    /// Graham's bound for list scheduling, in any order.
    #[test]
    fn whoever_is_free_takes_the_next_ends_within_one_item_of_the_mean(
        lengths in prop::collection::vec(0..3000usize, 0..20),
        tiling in tilings(),
        policy in policies(),
        ctas in 1..40usize,
    ) {
        let documents = Documents::from_lengths(&lengths).unwrap();
        let policy = Policy { assignment: Assignment::DYNAMIC, ..policy };
        let timeline = simulate(&documents, &tiling, &policy, &Cost::UNIT, count(ctas));
        let mean = timeline.total() / ctas as f64;
        prop_assert!(timeline.makespan() <= mean + timeline.longest() + 1e-9);

        // One CTA per position, sent out by the hardware, is the same.
        let launch = BackwardLaunch { grid: usize::MAX, overflow: 1 };
        let policy = Policy { assignment: Assignment::Launches(launch), ..policy };
        let launched = simulate(&documents, &tiling, &policy, &Cost::UNIT, count(ctas));
        prop_assert_eq!(launched, timeline);
    }

    #[test]
    fn it_agrees_with_a_simulation_of_every_tick(
        lengths in prop::collection::vec(0..900usize, 0..8),
        tiling in tilings(),
        policy in policies(),
        ctas in 1..8usize,
        per_item in 0..3u32,
    ) {
        let tiling = tiling.with_item_rows(tiling.item_rows.max(64));
        let documents = Documents::from_lengths(&lengths).unwrap();
        let cost = Cost { per_block: 2.0, per_item: f64::from(per_item) };
        let timeline = simulate(&documents, &tiling, &policy, &cost, count(ctas));
        let durations = durations(&timeline);
        let mut expected = match policy.assignment {
            Assignment::Launches(launch) => tick_by_tick_launches(&durations, launch, ctas),
            other => tick_by_tick(&durations, other, ctas),
        };
        expected.sort_unstable();
        let mut found: Vec<_> = timeline
            .lanes()
            .iter()
            .flatten()
            .map(|span| (span.position, span.start as u64, span.end as u64))
            .collect();
        found.sort_unstable();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn no_assignment_beats_the_bound_and_none_beats_the_best(
        lengths in prop::collection::vec(1..700usize, 1..4),
        order in prop::sample::select(&ORDERS[..]),
        assignment in assignments(),
        ctas in 1..4usize,
    ) {
        let documents = Documents::from_lengths(&lengths).unwrap();
        let tiling = Tiling::forward(Mask::Causal);
        let policy = Policy { order, sections: sections(1, 1), assignment };
        let timeline = simulate(&documents, &tiling, &policy, &Cost::UNIT, count(ctas));
        let best = optimum(&durations(&timeline), &mut vec![0; ctas]) as f64;
        prop_assert!(timeline.bound() <= best + 1e-9);
        prop_assert!(best <= timeline.makespan());
    }
}

/// The nine workloads at unit cost, all heads in one section.
fn nine(mask: Mask, policy: Policy, ctas: usize) -> [Timeline; 9] {
    WORKLOADS.map(|workload| of(&workload, mask, policy, ctas))
}

fn of(workload: &Workload, mask: Mask, policy: Policy, ctas: usize) -> Timeline {
    let tiling = Tiling::forward(mask);
    simulate(
        &workload.documents(),
        &tiling,
        &policy,
        &Cost::UNIT,
        count(ctas),
    )
}

fn longest_first(assignment: Assignment) -> Policy {
    Policy {
        order: Order::LongestFirst,
        sections: sections(16, 16),
        assignment,
    }
}

/// Ratios to the bound on 132 and 148 CTAs, from an independent script, in thousandths.
#[test]
fn alternating_assignment_stays_within_1_15_of_the_bound_on_the_nine_workloads() {
    let causal = [
        [1031, 1031, 1031, 1031, 1002, 1009, 1076, 1076, 1006],
        [1020, 1003, 1098, 1012, 1057, 1033, 1116, 1116, 1014],
    ];
    let full = [
        [1031, 1031, 1031, 1031, 1031, 1031, 1109, 1109, 1009],
        [1012, 1012, 1012, 1012, 1147, 1127, 1033, 1033, 1005],
    ];
    for (mask, expected) in [(Mask::Causal, causal), (Mask::Full, full)] {
        for (ctas, expected) in [132, 148].into_iter().zip(expected) {
            let timelines = nine(mask, longest_first(Assignment::Alternating), ctas);
            let found = timelines.map(|timeline| (1000.0 * timeline.ratio()).round() as u32);
            assert_eq!(found, expected, "{mask}, {ctas} CTAs");
            assert!(found.iter().all(|&ratio| ratio <= 1150));
        }
    }
}

/// Sections break the order by cost that alternation lives on.
#[test]
fn alternating_assignment_needs_all_heads_in_one_section() {
    let policy = Policy {
        sections: sections(16, 4),
        ..longest_first(Assignment::Alternating)
    };
    let skewed = Workload::named("8192+32x256").unwrap();
    assert!(of(skewed, Mask::Causal, policy, 132).ratio() > 2.9);
    let dynamic = Policy {
        assignment: Assignment::DYNAMIC,
        ..policy
    };
    assert!(of(skewed, Mask::Causal, dynamic, 132).ratio() < 1.11);
}

/// The workload with its longest document moved to `place`.
fn with_longest_at(workload: &Workload, place: fn(usize) -> usize) -> Documents {
    let mut lengths = workload.lengths.to_vec();
    let longest = (0..lengths.len()).max_by_key(|&document| lengths[document]);
    let long = lengths.remove(longest.unwrap());
    lengths.insert(place(lengths.len()), long);
    Documents::from_lengths(&lengths).unwrap()
}

/// The paper's section 4.3: 10 to 65 % on the causal forward pass. "Removed" is a plain grid here:
/// query tiles ascending, then documents, then heads, each CTA to the multiprocessor that is free
/// first.
#[test]
fn removing_longest_first_costs_skewed_workloads_what_the_paper_says() {
    let plain = Policy {
        order: Order::Input,
        sections: sections(16, 1),
        assignment: Assignment::DYNAMIC,
    };
    let penalty = |workload: &str, place: fn(usize) -> usize, ctas: usize| {
        let documents = with_longest_at(Workload::named(workload).unwrap(), place);
        let makespan = |policy: &Policy| {
            let tiling = Tiling::forward(Mask::Causal);
            simulate(&documents, &tiling, policy, &Cost::UNIT, count(ctas)).makespan()
        };
        100.0 * (makespan(&plain) / makespan(&longest_first(Assignment::DYNAMIC)) - 1.0)
    };
    let places: [fn(usize) -> usize; 3] = [|_| 0, |others| others / 2, |others| others];
    for ctas in [132, 148] {
        for place in places {
            for workload in ["8192+32x256", "8192+224x256", "logu11-16k"] {
                let percent = penalty(workload, place, ctas);
                assert!((20.0..35.0).contains(&percent), "{workload}: {percent} %");
            }
            // 65,536 rows hide more: by Graham's bound nothing dynamic can lose 12 % here.
            let percent = penalty("logu29-64k", place, ctas);
            assert!((4.0..9.0).contains(&percent), "{percent} %");
        }
    }
}
