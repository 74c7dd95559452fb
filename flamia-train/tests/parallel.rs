//! A step of several ranks against the same step in one process. Ranks are threads here, with a model each.
#![cfg(feature = "torch")]

mod common;

use std::net::TcpListener;
use std::thread;

use common::{ADAMW, CAUSAL_SDPA, floats, labels, model, tiny_shape};
use datasets::Row;
use flamia_autograd::distributed::{Member, StoreAddress};
use flamia_sched::Mask;
use flamia_train::batch::MicroBatch;
use flamia_train::distributed::share::{Share, share};
use flamia_train::distributed::{DataParallel, Team, World};
use flamia_train::model::{Model, Params};
use flamia_train::optim::AdamW;
use flamia_train::settings::DistributedSettings;
use flamia_train::step::{StepError, StepReport, launch_step};
use proptest::prelude::*;
use tch::Device;

const ROWS_PER_STEP: usize = 12;

/// A row of documents of these lengths.
fn row(lengths: &[usize], seed: i64) -> Row {
    let documents: Vec<Vec<i64>> = lengths
        .iter()
        .map(|&length| {
            (0..length as i64)
                .map(|t| (seed * 5 + t * t + t * seed) % 11)
                .collect()
        })
        .collect();
    let mut cu_seqlens = vec![0];
    for length in lengths {
        cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + *length as i64);
    }
    Row {
        tokens: documents.concat(),
        labels: documents.iter().flat_map(|tokens| labels(tokens)).collect(),
        positions: lengths
            .iter()
            .flat_map(|&length| 0..length as i64)
            .collect(),
        cu_seqlens,
        padding: 0,
        bytes: lengths.iter().sum::<usize>() as u64,
    }
}

/// The rows of a step, very unlike each other.
fn rows(step: usize) -> Vec<Row> {
    (0..ROWS_PER_STEP)
        .map(|i| {
            let pieces = 1 + (i * 7 + step) % 12;
            let mut lengths = vec![24 / pieces; pieces];
            lengths[0] += 24 % pieces;
            row(&lengths, (step * ROWS_PER_STEP + i) as i64)
        })
        .collect()
}

/// Weights, and both moments, in order.
fn state(params: &Params, optimizer: &AdamW) -> Vec<Vec<f32>> {
    let weights = params.iter().map(|(_, param)| floats(param));
    let moments = optimizer.tensors(params);
    weights
        .chain(moments.iter().map(|(_, moment)| floats(moment)))
        .collect()
}

struct Trained {
    reports: Vec<StepReport>,
    state: Vec<Vec<f32>>,
}

fn trained_alone(lrs: &[f64]) -> Trained {
    let mut model = model(tiny_shape(), 1);
    let mut optimizer = AdamW::new(ADAMW, &model.params).unwrap();
    optimizer.guard();
    let reports = lrs.iter().enumerate().map(|(step, &lr)| {
        let rows = rows(step);
        let batches: Vec<_> = rows
            .chunks(4)
            .map(|rows| MicroBatch::new(rows, Device::Cpu).unwrap())
            .collect();
        launch_step(&mut model, &mut optimizer, &batches, &CAUSAL_SDPA, lr, 0.5)
            .unwrap()
            .read()
            .unwrap()
    });
    Trained {
        reports: reports.collect(),
        state: state(&model.params, &optimizer),
    }
}

/// Runs `rank` on `world` threads and returns what each returned.
fn team<R: Send>(world: usize, rank: impl Fn(&Team) -> R + Sync) -> Vec<R> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let settings = DistributedSettings {
        patience: 60.0,
        ..DistributedSettings::default()
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|number| {
                let (rank, settings) = (&rank, &settings);
                scope.spawn(move || {
                    let told = World {
                        member: Member {
                            rank: number,
                            world,
                        },
                        local_rank: number,
                        local_world: world,
                        store: StoreAddress {
                            host: "127.0.0.1".into(),
                            port,
                        },
                        serves: number == 0,
                        restarts: 0,
                    };
                    let team = Team::join(told, settings, |verdict| panic!("{verdict}")).unwrap();
                    let result = rank(&team);
                    team.leave().unwrap();
                    result
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

struct Ranked {
    parallel: DataParallel,
    model: Model,
    device: Device,
}

impl Ranked {
    fn new(team: &Team, device: Device, bucket_bytes: usize) -> Self {
        // Rank 0's weights are those of all.
        let seed = 1 + team.member().rank as u64;
        let params = Params::init(&tiny_shape().parameters(0.4), seed, device).unwrap();
        let mut model = Model::new(tiny_shape(), params);
        let whole = AdamW::new(ADAMW, &model.params).unwrap();
        let parallel = DataParallel::new(team, &mut model, &whole, device, bucket_bytes);
        Self {
            parallel: parallel.unwrap(),
            model,
            device,
        }
    }

    fn step(&mut self, team: &Team, step: usize, lr: f64) -> Result<StepReport, StepError> {
        let device = self.device;
        let share = share(rows(step), &self.model.shape, Mask::Causal, team.member()).unwrap();
        let batches: Vec<_> = share
            .rows
            .chunks(2)
            .map(|rows| MicroBatch::new(rows, device).unwrap())
            .collect();
        let Self {
            parallel, model, ..
        } = self;
        parallel
            .launch_step(model, &batches, share.counts, &CAUSAL_SDPA, lr, 0.5)?
            .read()
    }
}

#[test]
fn steps_of_any_number_of_ranks_and_buckets_are_those_of_one_process() {
    let ways = [(1, 1), (2, 1), (2, 2000), (3, 600), (4, 1 << 20)];
    compare(&ways, Device::Cpu);
}

/// NCCL, as far as one GPU goes.
/// `cargo test -p flamia-train --test parallel -- --ignored` on a machine with an NVIDIA GPU.
#[test]
#[ignore = "needs a GPU"]
fn steps_of_one_rank_on_a_gpu_are_those_of_one_process() {
    assert_eq!(flamia_autograd::load_cuda(), Ok(true));
    compare(&[(1, 1), (1, 600), (1, 1 << 20)], Device::Cuda(0));
}

/// Numbers of ranks, and bytes of a bucket.
fn compare(ways: &[(usize, usize)], device: Device) {
    let lrs = [1e-2; 4];
    let alone = trained_alone(&lrs);
    for &(world, bucket_bytes) in ways {
        let ranks = team(world, |team| {
            let mut ranked = Ranked::new(team, device, bucket_bytes);
            let reports: Vec<_> = (0..lrs.len())
                .map(|step| ranked.step(team, step, lrs[step]).unwrap())
                .collect();
            let weights: Vec<_> = ranked.model.params.iter().map(|(_, p)| floats(p)).collect();
            let whole = ranked.parallel.whole_optimizer(&ranked.model).unwrap();
            assert_eq!(whole.is_some(), team.leads());
            let whole = whole.map(|whole| {
                assert_eq!(whole.step_count(), lrs.len() as u64);
                state(&ranked.model.params, &whole)
            });
            (reports, weights, whole)
        });
        for (reports, weights, _) in &ranks {
            for (report, expected) in reports.iter().zip(&alone.reports) {
                let (loss, theirs) = (report.loss, expected.loss);
                assert_eq!((loss.tokens, loss.bytes), (theirs.tokens, theirs.bytes));
                assert!(
                    (loss.nats / theirs.nats - 1.0).abs() < 1e-5,
                    "{loss:?} {theirs:?}"
                );
                let norm = report.grad_norm / expected.grad_norm;
                assert!((norm - 1.0).abs() < 1e-4, "{report:?} {expected:?}");
            }
            // The same bits on every rank.
            assert_eq!(weights, &ranks[0].1);
        }
        let found = ranks[0].2.as_ref().unwrap();
        assert_eq!(found.len(), alone.state.len());
        for (found, expected) in found.iter().flatten().zip(alone.state.iter().flatten()) {
            assert!(
                (found - expected).abs() < 2e-5,
                "{world} ranks, buckets of {bucket_bytes}: {found} and {expected}"
            );
        }
    }
}

#[test]
fn what_is_not_finite_on_one_rank_leaves_the_update_out_on_all() {
    let weights = |ranked: &Ranked| {
        let params = ranked.model.params.iter();
        params.map(|(_, param)| floats(param)).collect::<Vec<_>>()
    };
    let ranks = team(2, |team| {
        let mut ranked = Ranked::new(team, Device::Cpu, 600);
        ranked.step(team, 0, 1e-2).unwrap();
        let before = weights(&ranked);
        let sound = ranked.model.shape.norm_eps;
        if team.member().rank == 1 {
            ranked.model.shape.norm_eps = f64::NAN;
        }
        assert!(!ranked.step(team, 1, 1e-2).unwrap().is_finite());
        assert_eq!(weights(&ranked), before);
        // They go on together.
        ranked.model.shape.norm_eps = sound;
        assert!(ranked.step(team, 2, 1e-2).unwrap().is_finite());
        assert_ne!(weights(&ranked), before);
        weights(&ranked)
    });
    assert_eq!(ranks[0], ranks[1]);
    assert!(ranks[0].iter().flatten().all(|weight| weight.is_finite()));
}

proptest! {
    #[test]
    fn a_batch_is_shared_whole_and_about_equally(
        pieces in prop::collection::vec(1usize..16, 1..7),
        world in 1usize..5,
    ) {
        let shape = tiny_shape();
        let batch: Vec<Row> = (0..pieces.len() * world)
            .map(|i| row(&vec![32 / pieces[i % pieces.len()]; pieces[i % pieces.len()]], i as i64))
            .collect();
        let shares: Vec<Share> = (0..world)
            .map(|rank| share(batch.clone(), &shape, Mask::Causal, Member { rank, world }).unwrap())
            .collect();
        let sorted = |rows: &[Row]| {
            let mut tokens: Vec<_> = rows.iter().map(|row| row.tokens.clone()).collect();
            tokens.sort();
            tokens
        };
        let all: Vec<Row> = shares.iter().flat_map(|share| share.rows.clone()).collect();
        prop_assert_eq!(sorted(&all), sorted(&batch));
        let whole = MicroBatch::new(&batch, Device::Cpu).unwrap();
        for share in &shares {
            prop_assert_eq!(share.rows.len(), pieces.len());
            prop_assert_eq!(share.counts, whole.counts());
            prop_assert_eq!(share.pairs, whole.visible_pairs(Mask::Causal));
        }
    }
}

#[test]
fn rows_that_no_share_can_be_equal_of_are_refused_with_a_remedy() {
    let batch = rows(0).split_off(ROWS_PER_STEP - 3);
    let error = share(
        batch,
        &tiny_shape(),
        Mask::Causal,
        Member { rank: 0, world: 2 },
    );
    let told = error.map(drop).unwrap_err().to_string();
    assert!(
        told.contains("use 2 or 4 rows") && told.contains("batch.accumulate"),
        "{told}"
    );
}
