//! Collective operations against what one process computes. Ranks are threads here: each has a store and
//! groups of its own, as a process would.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use flamia_autograd::distributed::{Backend, DistributedError, Group, Member, Store, StoreAddress};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const PATIENCE: Duration = Duration::from_secs(30);

fn free_address() -> StoreAddress {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    StoreAddress {
        host: "127.0.0.1".into(),
        port: listener.local_addr().unwrap().port(),
    }
}

/// Runs `rank` on `world` threads and returns what each returned, in order.
fn ranks<R: Send>(world: usize, rank: impl Fn(&Store, Member) -> R + Sync) -> Vec<R> {
    let address = free_address();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|number| {
                let (address, rank) = (address.clone(), &rank);
                scope.spawn(move || {
                    let member = Member {
                        rank: number,
                        world,
                    };
                    let store = Store::open(address, number, number == 0, PATIENCE).unwrap();
                    let result = rank(&store, member);
                    // The server stays until all are done.
                    store.set(&format!("done {number}"), b"").unwrap();
                    if number == 0 {
                        for other in 0..world {
                            store.get(&format!("done {other}"), PATIENCE).unwrap();
                        }
                    }
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

fn gloo(store: &Store, member: Member) -> Group {
    Group::join(store, "test", member, Backend::Gloo, 0, PATIENCE).unwrap()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float)).unwrap()
}

/// Rank `rank`'s values: integers, so that every order of summation gives the same.
fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 7 + rank * 13) % 101) as f32 - 50.0)
        .collect()
}

fn sums(world: usize, count: usize) -> Vec<f32> {
    let all: Vec<_> = (0..world).map(|rank| values(rank, count)).collect();
    (0..count)
        .map(|i| all.iter().map(|values| values[i]).sum())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn operations_are_those_of_one_process(world in 1usize..5, part in 1usize..200) {
        let count = world * part;
        let found = ranks(world, |store, member| {
            let group = gloo(store, member);
            let mine = || Tensor::from_slice(&values(member.rank, count));
            let of = |tensor: &Tensor| tensor.narrow(0, (member.rank * part) as i64, part as i64);

            // Several at once, waited for in another order.
            let [reduced, scattered, told] = [mine(), mine(), mine()];
            let first = group.all_reduce(&reduced).unwrap();
            let second = group.reduce_scatter(&of(&scattered), &scattered).unwrap();
            let third = group.broadcast(&told, world - 1).unwrap();
            third.wait().unwrap();
            second.wait().unwrap();
            first.wait().unwrap();

            let apart = Tensor::zeros([part as i64], (Kind::Float, Device::Cpu));
            group.reduce_scatter(&apart, &mine()).unwrap().wait().unwrap();
            assert_eq!(apart, of(&scattered));

            let gathered = mine();
            group.all_gather(&gathered, &of(&gathered)).unwrap().wait().unwrap();
            let double = mine().to_kind(Kind::Double);
            group.all_reduce(&double).unwrap().wait().unwrap();
            group.barrier().unwrap();
            [&reduced, &of(&scattered), &told, &gathered, &double].map(floats)
        });
        let expected = sums(world, count);
        let gathered: Vec<f32> = (0..world)
            .flat_map(|rank| values(rank, count)[rank * part..][..part].to_vec())
            .collect();
        for (rank, [reduced, scattered, told, all, double]) in found.iter().enumerate() {
            prop_assert_eq!(reduced, &expected);
            prop_assert_eq!(scattered, &expected[rank * part..][..part]);
            prop_assert_eq!(told, &values(world - 1, count));
            prop_assert_eq!(all, &gathered);
            prop_assert_eq!(double, &expected);
        }
    }
}

#[test]
fn a_store_tells_what_was_set_and_waits_for_what_will_be() {
    let found = ranks(2, |store, member| {
        if member.rank == 0 {
            thread::sleep(Duration::from_millis(50));
            store.set("binary", &[0, 255, 0]).unwrap();
            return Vec::new();
        }
        assert!(!store.has("never").unwrap());
        let found = store.get("binary", PATIENCE).unwrap();
        assert!(store.has("binary").unwrap());
        let address = store.address().clone();
        let apart = Store::open(address, 1, false, PATIENCE)
            .unwrap()
            .under("apart");
        assert!(!apart.has("binary").unwrap());
        apart.set("key", b"theirs").unwrap();
        assert!(store.has("apart/key").unwrap() && !store.has("key").unwrap());
        let start = Instant::now();
        let error = store
            .get("never", Duration::from_millis(100))
            .unwrap_err()
            .to_string();
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(
            error.contains("rank 1 cannot get \"never\" in the store at 127.0.0.1:"),
            "{error}"
        );
        found
    });
    assert_eq!(found[1], [0, 255, 0]);
}

#[test]
fn nobody_at_the_address_is_an_error_that_names_it() {
    let address = free_address();
    let told = address.to_string();
    let error = Store::open(address, 3, false, Duration::from_millis(300)).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("rank 3 cannot open the store"), "{error}");
    assert!(
        error.contains(&told) && error.contains("MASTER_PORT"),
        "{error}"
    );
}

#[test]
fn a_rank_that_never_comes_is_not_waited_for_forever() {
    let address = free_address();
    let store = Store::open(address, 0, true, PATIENCE).unwrap();
    let member = Member { rank: 0, world: 2 };
    let short = Duration::from_millis(300);
    let start = Instant::now();
    let error = Group::join(&store, "test", member, Backend::Gloo, 0, short).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(20));
    assert!(
        matches!(
            error,
            DistributedError::Join {
                rank: 0,
                world: 2,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn an_operation_without_the_others_fails_and_says_which() {
    let errors = ranks(2, |store, member| {
        let short = Duration::from_millis(300);
        let group = Group::join(store, "test", member, Backend::Gloo, 0, short).unwrap();
        if member.rank == 1 {
            // It is there, and takes no part.
            store.get("asked", PATIENCE).unwrap();
            return String::new();
        }
        let tensor = Tensor::from_slice(&[1f32]);
        let error = group.all_reduce(&tensor).unwrap().wait().unwrap_err();
        store.set("asked", b"").unwrap();
        error.to_string()
    });
    let error = &errors[0];
    assert!(
        error.starts_with("rank 0 of 2: all-reduce failed: "),
        "{error}"
    );
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    ranks(1, |store, member| {
        let group = gloo(store, member);
        let [three, two] = [3, 2].map(|n| Tensor::zeros([n], (Kind::Float, Device::Cpu)));
        let error = group.all_gather(&two, &three).map(drop).unwrap_err();
        assert!(
            matches!(
                error,
                DistributedError::Collective {
                    operation: "all-gather",
                    ..
                }
            ),
            "{error}"
        );
    });
}

/// Nothing here loads torch's CUDA part.
#[test]
fn nccl_without_torch_on_a_gpu_is_an_error_with_a_remedy() {
    ranks(1, |store, member| {
        let group = Group::join(store, "test", member, Backend::Nccl, 0, PATIENCE);
        let error = group.map(drop).unwrap_err();
        assert!(
            matches!(error, DistributedError::NoBackend { .. }),
            "{error}"
        );
        let told = error.to_string();
        assert!(
            told.contains("ProcessGroupNCCL") && told.contains("load_cuda"),
            "{told}"
        );
    });
}
