//! Resident memory stays flat. Alone in its process, so that nothing else moves the figure.

mod common;

use common::{Alive, Product, one};
use flamia_autograd::apply;
use tch::{Device, Kind, Tensor};

const ITERATIONS: usize = 1_000;
/// Each tensor holds 256 KiB, so that one leaked tensor per iteration shows as 250 MiB.
const ELEMENTS: i64 = 1 << 16;
const ALLOWED_GROWTH: u64 = 32 << 20;

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    // SAFETY: sysconf only reads a constant.
    pages * u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap()
}

fn assert_flat(what: &str, alive: &Alive, mut step: impl FnMut()) {
    for _ in 0..10 {
        step();
    }
    let before = resident_bytes();
    for _ in 0..ITERATIONS {
        step();
    }
    let after = resident_bytes();
    assert!(
        after < before + ALLOWED_GROWTH,
        "{what}: {} MiB before, {} MiB after",
        before >> 20,
        after >> 20
    );
    assert_eq!(alive.count(), 0, "{what}");
}

#[test]
fn nothing_leaks_over_a_thousand_iterations() {
    // The tensors are small; a pool of threads would only add its own memory.
    tch::set_num_threads(1);
    let alive = Alive::default();
    let mut x = Tensor::rand([ELEMENTS], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let forward = |x: &Tensor| {
        // A non-leaf input, so that the saved input belongs to the graph alone.
        let input = x * 2.0;
        one(apply(
            Product {
                token: Some(alive.token()),
            },
            &[Some(&input), Some(x)],
        ))
        .unwrap()
    };

    assert_flat("forward and drop", &alive, || drop(forward(&x)));
    assert_flat("forward under no_grad", &alive, || {
        drop(tch::no_grad(|| forward(&x)))
    });
    assert_flat("forward, backward and drop", &alive, || {
        forward(&x).sum(Kind::Float).backward();
        x.zero_grad();
    });
}
