//! Graphs that cross threads, and one graph used by many.

mod common;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use common::{Alive, Product, leaf, one, product, values};
use flamia_autograd::{FunctionError, apply, apply_fn};
use tch::{Kind, Tensor};

const THREADS: usize = 8;

#[test]
fn backward_from_a_second_thread() {
    let alive = Alive::default();
    let x = leaf(&[3]);
    let loss = one(apply(
        Product {
            token: Some(alive.token()),
        },
        &[Some(&x), Some(&x)],
    ))
    .unwrap()
    .sum(Kind::Double);
    thread::spawn(move || loss.f_backward())
        .join()
        .unwrap()
        .unwrap();
    assert_eq!(alive.count(), 0);
    assert_eq!(values(&x.grad()), values(&(&x * 2.0)));
}

#[test]
fn many_graphs_at_once() {
    let alive = Alive::default();
    thread::scope(|scope| {
        for number in 0..THREADS {
            let alive = &alive;
            scope.spawn(move || {
                for round in 0..200 {
                    let x = (leaf(&[4]) * (number + round + 1) as f64)
                        .detach()
                        .set_requires_grad(true);
                    let function = Product {
                        token: Some(alive.token()),
                    };
                    let y = one(apply(function, &[Some(&x), Some(&x)])).unwrap();
                    if round % 10 == 9 {
                        let failing = one(apply_fn(
                            "failing",
                            &[Some(&y)],
                            |_, inputs| Ok(vec![inputs[0].unwrap() * 1.0]),
                            move |_, _| Err(FunctionError::custom(format!("{number}"))),
                        ))
                        .unwrap();
                        let error = failing.sum(Kind::Double).f_backward().unwrap_err();
                        let expected = format!("backward of failing: {number}");
                        assert!(error.to_string().contains(&expected), "{error}");
                    } else {
                        y.sum(Kind::Double).f_backward().unwrap();
                        assert_eq!(values(&x.grad()), values(&(&x * 2.0)));
                    }
                }
            });
        }
    });
    assert_eq!(alive.count(), 0);
}

/// The state is `Send` and not `Sync`: its backward must never run twice at once.
#[test]
fn one_graph_in_many_threads() {
    const ROUNDS: usize = 100;
    let x = leaf(&[3]);
    let total = Arc::new(AtomicUsize::new(0));
    let loss = one(apply_fn(
        "counting",
        &[Some(&product(&x, &x).unwrap())],
        |_, inputs| Ok(vec![inputs[0].unwrap() * 1.0]),
        {
            let total = total.clone();
            let runs = Cell::new(0);
            move |_, grads| {
                let seen = runs.get();
                thread::yield_now();
                runs.set(seen + 1);
                total.store(runs.get(), Ordering::SeqCst);
                Ok(vec![grads[0].as_ref().map(Tensor::shallow_clone)])
            }
        },
    ))
    .unwrap()
    .sum(Kind::Double);

    let expected = values(&(&x * 2.0));
    let workers: Vec<_> = (0..THREADS)
        .map(|_| {
            let (loss, x, expected) = (loss.shallow_clone(), x.shallow_clone(), expected.clone());
            thread::spawn(move || {
                for _ in 0..ROUNDS {
                    let grads = Tensor::f_run_backward(&[&loss], &[&x], true, false).unwrap();
                    assert_eq!(values(&grads[0]), expected);
                }
            })
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
    assert_eq!(total.load(Ordering::SeqCst), THREADS * ROUNDS);
}
